#!/bin/bash
{% for option in options %}
#SBATCH {{ option }}
{% endfor %}
{% for line in setup %}
{{ line }}
{% endfor %}

if [ "$SLURM_ARRAY_TASK_ID" = 1 ] && [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then
  # queue the report once, after the whole array
  {{ ask_for_report }}
#!/bin/bash
{% for line in setup %}
{{ line }}
{% endfor %}
{{ report }}
{{ end }}
fi

{{ run }}
code=$?
if [ "$code" = {{ preempted }} ]; then
  # preempted or out of time: finished units are stored, and the task resumes when it is scheduled again
  scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
fi
exit "$code"
