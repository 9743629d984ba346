{{/* The paths that Baton needs, by component; all others are denied. */}}

{{- define "baton.routerIngress" -}}
{{- $ports := include "baton.ports" . | fromYaml -}}
# Clients, and the test.
- {{ with .Values.networkPolicy.clients }}from:
    {{- toYaml . | nindent 4 }}
    {{- include "baton.peers" (dict "root" $ "components" (list "test")) | nindent 4 }}
  {{ end }}ports: [{port: {{ $ports.http }}}, {port: {{ $ports.grpc }}}]
# Prometheus and probes.
- from:
    {{- include "baton.monitoringPeers" . | nindent 4 }}
  ports: [{port: {{ $ports.adminHttp }}}]
{{- end -}}

{{- define "baton.routerEgress" -}}
{{- $ports := include "baton.ports" . | fromYaml -}}
- to:
    {{- include "baton.workerPeers" . | nindent 4 }}
  ports:
    {{- include "baton.portRange" (dict "first" $ports.worker) | nindent 4 }}
{{- include "baton.toRedis" . }}
{{- include "baton.toHub" (dict "root" . "component" "router") }}
{{- include "baton.toCollector" . }}
{{- end -}}

{{- define "baton.workerIngress" -}}
{{- $ports := include "baton.ports" . | fromYaml -}}
- from:
    {{- include "baton.peers" (dict "root" . "components" (list "router")) | nindent 4 }}
  ports:
    {{- include "baton.portRange" (dict "first" $ports.worker) | nindent 4 }}
# Links.
- from:
    {{- include "baton.workerPeers" . | nindent 4 }}
  ports:
    {{- include "baton.linkPorts" . | nindent 4 }}
# Prometheus and probes.
- from:
    {{- include "baton.monitoringPeers" . | nindent 4 }}
  ports:
    - {port: {{ $ports.adminHttp }}}
    {{- include "baton.portRange" (dict "first" $ports.workerMetrics) | nindent 4 }}
{{- if include "baton.withRay" . }}
{{ include "baton.betweenRay" (dict "root" . "key" "from") }}
{{- end }}
{{- end -}}

{{/* (root, component) */}}
{{- define "baton.workerEgress" -}}
- to:
    {{- include "baton.workerPeers" .root | nindent 4 }}
  ports:
    {{- include "baton.linkPorts" .root | nindent 4 }}
{{- include "baton.toRedis" .root }}
{{- include "baton.toHub" . }}
{{- include "baton.toCollector" .root }}
{{- if include "baton.withRay" .root }}
{{ include "baton.betweenRay" (dict "root" .root "key" "to") }}
{{- end }}
{{- end -}}

{{- define "baton.redisIngress" -}}
{{- $ports := include "baton.ports" . | fromYaml -}}
- from:
    {{- include "baton.peers" (dict "root" . "components" (list "router" "workers" "prefill" "decode" "supervisor" "ray-head")) | nindent 4 }}
  ports: [{port: {{ $ports.redis }}}]
{{- end -}}

{{/* Ray's processes call each other at ports of their own choice: (root, key: from or to). */}}
{{- define "baton.betweenRay" -}}
- {{ .key }}:
    {{- include "baton.peers" (dict "root" .root "components" (list "ray-head" "supervisor" "workers" "prefill" "decode")) | nindent 4 }}
{{- end -}}

{{- define "baton.supervisorIngress" -}}
{{- $ports := include "baton.ports" . | fromYaml -}}
- from:
    {{- include "baton.monitoringPeers" . | nindent 4 }}
  ports: [{port: {{ $ports.adminHttp }}}]
{{ include "baton.betweenRay" (dict "root" . "key" "from") }}
{{- end -}}

{{- define "baton.testEgress" -}}
{{- $ports := include "baton.ports" . | fromYaml -}}
- to:
    {{- include "baton.peers" (dict "root" . "components" (list "router")) | nindent 4 }}
  ports: [{port: {{ $ports.http }}}, {port: {{ $ports.grpc }}}]
{{- end -}}
