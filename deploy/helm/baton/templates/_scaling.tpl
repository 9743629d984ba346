{{/* What scalers see. Each query gives the load in workers that would be busy with it; the threshold is what the workers
     of one pod should bear. */}}

{{/* Pods of a scaled Deployment, kept as they are now: (root, name). Helm would else take the number away, and the API
     server start over with one. Nothing where there is no such Deployment, or no API server to ask. */}}
{{- define "baton.liveReplicas" -}}
{{- $live := lookup "apps/v1" "Deployment" .root.Release.Namespace .name -}}
{{- with $live }}{{ if hasKey .spec "replicas" }}
replicas: {{ .spec.replicas }}
{{- end }}{{ end -}}
{{- end -}}

{{/* Labels of the workers of a role in Prometheus: (root, role). */}}
{{- define "baton.roleLabels" -}}
{{ include "baton.modelLabel" .root }},role={{ .role | quote }}
{{- end -}}

{{/* Prefill workers that all requests of the last minute would keep busy, whether they were served or not. */}}
{{- define "baton.prefillDemand" -}}
sum(baton_router_demand_prefill_seconds{ {{- include "baton.modelLabel" . -}} }) / 60
{{- end -}}

{{/* Used decode workers by slots or KV blocks, whichever are scarcer, on average over a time: (root, over). */}}
{{- define "baton.usedDecode" -}}
{{- $decode := include "baton.roleLabels" (dict "root" .root "role" "decode") -}}
{{- $used := list -}}
{{- range $what := list "slots" "blocks" -}}
{{- $all := printf "baton_worker_%s{%s}" $what $decode -}}
{{- $free := printf "avg_over_time(baton_worker_free_%s{%s}[%s])" $what $decode $.over -}}
{{- $used = append $used (printf "(sum(%s) - sum(%s)) / avg(%s)" $all $free $all) -}}
{{- end -}}
clamp_min({{ first $used }}, scalar({{ last $used }}))
{{- end -}}

{{/* Decode workers that would be used, if all requests of the last minute were decoded: as many sequences at a time as
     come while one lasts (Little's law), each of which takes as much of a worker as those that run; at least those
     that are used on average over five minutes, since a backlog fills what was added only for a while. */}}
{{- define "baton.decodeDemand" -}}
{{- $decode := include "baton.roleLabels" (dict "root" . "role" "decode") -}}
{{- $model := include "baton.modelLabel" . -}}
{{- $running := printf "(sum(baton_worker_slots{%s}) - sum(avg_over_time(baton_worker_free_slots{%s}[1m])))" $decode $decode -}}
{{- $stages := printf "%s,stage=~\"reserve|prefill|handoff|decode\"" $model -}}
{{- $lasts := printf "sum(rate(baton_router_stage_seconds_sum{%s}[5m])) / sum(rate(baton_router_stage_seconds_count{%s,stage=\"decode\"}[5m]) > 0)" $stages $model -}}
{{- $often := include "baton.usedDecode" (dict "root" . "over" "5m") -}}
clamp_min(
  {{ include "baton.usedDecode" (dict "root" . "over" "1m") }} / clamp_min({{ $running }}, 1) * scalar(sum(baton_router_demand_requests{ {{- $model -}} }) / 60 * {{ $lasts }}),
  scalar({{ $often }}))
or {{ $often }}
{{- end -}}

{{/* The workers of a role that there are, while requests are refused or wait longer than for a moment; else 0: then none
     is taken away: (root, role). */}}
{{- define "baton.heldWorkers" -}}
{{- $model := include "baton.modelLabel" .root -}}
count(baton_worker_slots{ {{- include "baton.roleLabels" . -}} })
* scalar(
  (sum(baton_router_unserved_requests{ {{- $model -}} })
  + sum(min_over_time(baton_router_waiting_requests{ {{- $model -}} }[30s])))
  > bool 0)
{{- end -}}

{{/* A trigger of KEDA: (root, name, query, threshold). */}}
{{- define "baton.trigger" -}}
{{- $keda := .root.Values.keda -}}
- type: prometheus
  name: {{ .name }}
  metricType: AverageValue
  metadata:
    serverAddress: {{ $keda.prometheus | quote }}
    query: >-
      {{- .query | nindent 6 }}
    threshold: {{ .threshold | quote }}
    # Without figures the number of pods stays.
    ignoreNullValues: "false"
  {{- with $keda.authenticationRef }}
  authenticationRef: {name: {{ . | quote }}}
  {{- end }}
{{- end -}}
