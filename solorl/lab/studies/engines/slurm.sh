#!/bin/bash
{{DIRECTIVES}}

told= worker=
trap 'told=1; [ "$worker" ] && kill -USR1 $worker 2>/dev/null' TERM USR1
{{SETUP}}{{COMMAND}} &
worker=$!
[ "$told" ] && kill -USR1 $worker
while told=; wait $worker; code=$?; [ "$told" ]; do :; done
if [ $code -eq {{AGAIN}} ] || [ $code -eq 138 ]; then
    job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
    [ "$(squeue --noheader --format=%T --jobs=$job)" = RUNNING ] && scontrol requeue $job
fi
exit $code
