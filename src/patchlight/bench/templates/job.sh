#!/bin/bash
{% for option in options %}
#SBATCH {{ option }}
{% endfor %}
{% for line in setup %}
{{ line }}
{% endfor %}

if [ "$SLURM_ARRAY_TASK_ID" = 1 ] && [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then
  # asked for once: the report, after the whole array
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
  # preempted, or out of time, with work left: what is done is kept, and the task goes on when its turn comes
  scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
fi
exit "$code"
