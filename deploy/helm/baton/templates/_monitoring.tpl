{{/* Dashboards and alert rules, made of files/. */}}

{{/* The label of the served model, as in a selector. */}}
{{- define "baton.modelLabel" -}}
namespace={{ .Release.Namespace | quote }},model={{ include "baton.servedName" . | quote }}
{{- end -}}

{{/* Labels of the release's targets in Prometheus, as in a selector: a ServiceMonitor names a target for the Service, a
     PodMonitor for itself. */}}
{{- define "baton.jobLabels" -}}
{{- $names := list "headless" "router" "workers" "prefill" "decode" "supervisor" | join "|" -}}
namespace={{ .Release.Namespace | quote }},job=~{{ printf "(%s/)?%s-(%s)" .Release.Namespace (include "baton.fullname" .) $names | quote }}
{{- end -}}

{{/* Labels of the release's pods in kube-state-metrics, as in a selector; KubeRay's names go on with its own words. */}}
{{- define "baton.podNameLabels" -}}
{{- $names := list "router" "workers" "prefill" "decode" "supervisor" "redis" "ray-head" "head" | join "|" -}}
namespace={{ .Release.Namespace | quote }},pod=~{{ printf "%s-(%s)-.*" (include "baton.fullname" .) $names | quote }}
{{- end -}}

{{/* A dashboard of Grafana's as JSON: (root, source: a parsed file). */}}
{{- define "baton.dashboard" -}}
{{- $label := include "baton.modelLabel" .root -}}
{{- $pods := include "baton.podNameLabels" .root -}}
{{- $panels := list -}}
{{- range $index, $panel := .source.panels -}}
{{- $targets := list -}}
{{- range $number, $query := $panel.queries -}}
{{- $targets = append $targets (dict
    "refId" (printf "%c" (add 65 $number))
    "expr" ($query.expr | replace "$model" $label | replace "$pods" $pods)
    "legendFormat" $query.legend
    "datasource" (dict "type" "prometheus" "uid" "${source}")) -}}
{{- end -}}
{{- $panels = append $panels (dict
    "id" (add1 $index)
    "type" "timeseries"
    "title" $panel.title
    "datasource" (dict "type" "prometheus" "uid" "${source}")
    "gridPos" (dict "h" 8 "w" 12 "x" (mul 12 (mod $index 2)) "y" (mul 8 (div $index 2)))
    "fieldConfig" (dict "defaults" (dict "unit" $panel.unit "min" 0) "overrides" list)
    "options" (dict "legend" (dict "displayMode" "list" "placement" "bottom") "tooltip" (dict "mode" "multi"))
    "targets" $targets) -}}
{{- end -}}
{{- $source := dict "name" "source" "label" "Data source" "type" "datasource" "query" "prometheus" -}}
{{- dict
    "uid" (printf "%s-%s" .source.uid (include "baton.fullname" .root | sha256sum | trunc 8))
    "title" (printf "%s: %s" .source.title (include "baton.servedName" .root))
    "tags" (list "baton")
    "schemaVersion" 39
    "version" 1
    "editable" true
    "refresh" "30s"
    "time" (dict "from" "now-1h" "to" "now")
    "templating" (dict "list" (list $source))
    "panels" $panels | toPrettyJson -}}
{{- end -}}

{{/* Alert rules as Prometheus' groups. */}}
{{- define "baton.alertRules" -}}
{{- $label := include "baton.modelLabel" . -}}
{{- $alerts := .Values.monitoring.alerts -}}
{{- $bad := "overloaded|deadline|quarantined|unavailable|internal" -}}
{{- $rules := list -}}
{{- range .Files.Get "files/alerts.yaml" | fromYamlArray -}}
{{- $expr := .expr -}}
{{- $requests := printf "sum(rate(baton_router_requests_total{%s}[${1}]))" $label -}}
{{- $errors := printf "sum(rate(baton_router_requests_total{%s,outcome=~\"%s\"}[${1}]))" $label $bad -}}
{{- $bound := printf "%v" $alerts.ttftSeconds -}}
{{- if not (contains "." $bound) }}{{ $bound = printf "%s|%s.0" $bound $bound }}{{ end -}}
{{- $good := printf "sum(rate(baton_router_ttft_seconds_bucket{%s,le=~\"%s\"}[${1}]))" $label $bound -}}
{{- $slow := printf "(1 - %s / sum(rate(baton_router_ttft_seconds_count{%s}[${1}])))" $good $label -}}
{{- $expr = regexReplaceAll "\\$requests\\[(\\w+)\\]" $expr $requests -}}
{{- $expr = regexReplaceAll "\\$errors\\[(\\w+)\\]" $expr $errors -}}
{{- $expr = regexReplaceAll "\\$slow\\[(\\w+)\\]" $expr $slow -}}
{{- $gone := printf "absent(baton_router_redis_up{%s})" $label -}}
{{- $expr = $expr | replace "$gone" $gone | replace "$jobs" (include "baton.jobLabels" $) | replace "$pods" (include "baton.podNameLabels" $) -}}
{{- $expr = $expr | replace "$budget" (subf 1.0 $alerts.objective | printf "%.6g") | replace "$model" $label -}}
{{- $labels := dict "severity" .severity "namespace" $.Release.Namespace "release" $.Release.Name "cluster_name" (include "baton.cluster" $) "model" (include "baton.servedName" $) -}}
{{- $where := printf "%s (release %s, namespace %s): %s" (include "baton.servedName" $) $.Release.Name $.Release.Namespace .summary -}}
{{- $notes := dict "summary" $where "runbook_url" (printf "%s#%s" $alerts.runbookUrl (lower .alert)) -}}
{{- $rule := dict "alert" .alert "expr" $expr "labels" $labels "annotations" $notes -}}
{{- if .for }}{{ $_ := set $rule "for" .for }}{{ end -}}
{{- $rules = append $rules $rule -}}
{{- end -}}
groups:
  - name: {{ include "baton.fullname" . | quote }}
    rules:
      {{- toYaml $rules | nindent 6 }}
{{- end -}}
