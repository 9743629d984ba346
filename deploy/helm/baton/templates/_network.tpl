{{/* Peers and rules of NetworkPolicies. */}}

{{/* Pods of the cluster of any release, by component: (root, components). */}}
{{- define "baton.peers" -}}
- podSelector:
    matchLabels:
      {{- include "baton.clusterSelector" .root | nindent 6 }}
    matchExpressions:
      - {key: app.kubernetes.io/component, operator: In, values: {{ toJson .components }}}
{{- end -}}

{{/* The components that workers may run in, in any topology: another release of the cluster may have the other. */}}
{{- define "baton.workerPeers" -}}
{{- include "baton.peers" (dict "root" . "components" (list "workers" "prefill" "decode")) -}}
{{- end -}}

{{/* Monitoring's namespace, and nodes whose kubelet a network plugin does not let through by itself. */}}
{{- define "baton.monitoringPeers" -}}
- namespaceSelector:
    matchLabels:
      {{- toYaml .Values.networkPolicy.monitoringNamespace | nindent 6 }}
{{- range .Values.networkPolicy.nodeCIDRs }}
- ipBlock: {cidr: {{ . | quote }}}
{{- end }}
{{- end -}}

{{/* The sixteen ports that begin with one: (first). */}}
{{- define "baton.portRange" -}}
- {port: {{ .first }}, endPort: {{ add .first 15 }}}
{{- end -}}

{{/* Ports of links between workers. NCCL takes some of its own choice. */}}
{{- define "baton.linkPorts" -}}
{{- $ports := include "baton.ports" . | fromYaml -}}
{{- if eq (default "auto" .Values.transfer.transport) "nccl" -}}
- {port: 1024, endPort: 65535}
{{- else -}}
{{ include "baton.portRange" (dict "first" $ports.transfer) }}
{{ include "baton.portRange" (dict "first" $ports.frames) }}
{{- end -}}
{{- end -}}

{{/* The rule that lets pods resolve names: by the cluster's DNS (on OpenShift at its pods' own port) or by a cache on
     the node, at a link-local or a unique local address. */}}
{{- define "baton.toDns" -}}
{{- $dns := .Values.networkPolicy.dns -}}
- to:
    {{- range $dns.namespaces }}
    - namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: {{ . | quote }}}}
    {{- end }}
    {{- range $dns.cidrs }}
    - ipBlock: {cidr: {{ . | quote }}}
    {{- end }}
  ports:
    {{- range $dns.ports }}
    - {protocol: UDP, port: {{ . }}}
    - {protocol: TCP, port: {{ . }}}
    {{- end }}
{{- end -}}

{{/* Ports of your own Redis, as a list under `ports`: the configured one, else those that redis.url names, else 6379.
     Sentinels and a cluster name further nodes, which are at 6379 where nothing else is said. */}}
{{- define "baton.redisPorts" -}}
{{- $redis := .Values.redis -}}
{{- $ports := list -}}
{{- if $redis.port }}{{ $ports = list $redis.port }}
{{- else if $redis.url -}}
{{- $authority := regexReplaceAll "^[a-z+]+://([^/?]*).*$" $redis.url "${1}" -}}
{{- range splitList "," $authority }}{{ $ports = append $ports (regexFind ":[0-9]+$" . | trimPrefix ":" | default "6379" | int) }}{{ end -}}
{{- if contains "+" (splitList "://" $redis.url | first) }}{{ $ports = append $ports 6379 }}{{ end -}}
{{- end -}}
ports: {{ default (list 6379) $ports | uniq | toJson }}
{{- end -}}

{{/* The rule that lets pods reach Redis. */}}
{{- define "baton.toRedis" -}}
{{- if include "baton.bundledRedis" . }}
- to:
    {{- include "baton.peers" (dict "root" . "components" (list "redis")) | nindent 4 }}
  ports: [{port: {{ (include "baton.ports" . | fromYaml).redis }}}]
{{- else }}
- {{ with .Values.networkPolicy.redis }}to:
    {{- toYaml . | nindent 4 }}
  {{ end }}ports: [{{ range $index, $port := (include "baton.redisPorts" . | fromYaml).ports }}{{ if $index }}, {{ end }}{port: {{ $port }}}{{ end }}]
{{- end }}
{{- end -}}

{{/* The rule that lets Ray's head reach a Redis of its own. */}}
{{- define "baton.toRayRedis" -}}
{{- $fault := .Values.kuberay.gcsFaultTolerance -}}
{{- if and .Values.kuberay.enabled $fault.enabled $fault.redisAddress }}
- ports: [{port: {{ splitList ":" $fault.redisAddress | last }}}]
{{- end }}
{{- end -}}

{{/* The rule that lets pods reach the collector of traces. */}}
{{- define "baton.toCollector" -}}
{{- with .Values.tracing.endpoint }}
{{- $url := urlParse . }}
{{- $port := regexFind ":[0-9]+$" $url.host | trimPrefix ":" | default (eq $url.scheme "https" | ternary "443" "80") }}
- {{ with $.Values.networkPolicy.collector }}to:
    {{- toYaml . | nindent 4 }}
  {{ end }}ports: [{port: {{ $port }}}]
{{- end }}
{{- end -}}

{{/* The rule that lets pods load a model from a hub, from a mirror of it (HF_ENDPOINT) or through a proxy, at their
     ports: (root, component). */}}
{{- define "baton.toHub" -}}
{{- if eq .root.Values.model.source "hub" }}
{{- $ports := prepend .root.Values.networkPolicy.hubPorts 443 -}}
{{- range (include "baton.settings" . | fromYaml).extraEnv -}}
{{- if and .value (has (upper .name) (list "HF_ENDPOINT" "HTTPS_PROXY" "HTTP_PROXY" "ALL_PROXY")) -}}
{{- $url := urlParse (contains "://" .value | ternary .value (printf "http://%s" .value)) -}}
{{- $ports = append $ports (regexFind ":[0-9]+$" $url.host | trimPrefix ":" | default (eq $url.scheme "https" | ternary "443" "80") | int) -}}
{{- end -}}
{{- end }}
- to: [{ipBlock: {cidr: 0.0.0.0/0}}, {ipBlock: {cidr: "::/0"}}]
  ports:
    {{- range $ports | uniq }}
    - {port: {{ . }}}
    {{- end }}
{{- end }}
{{- end -}}

{{/* Families of a Service's addresses. */}}
{{- define "baton.ipFamilies" -}}
{{- with .Values.cluster.ipFamilyPolicy }}
ipFamilyPolicy: {{ . }}
{{- end }}
{{- with .Values.cluster.ipFamilies }}
ipFamilies: {{ toJson . }}
{{- end }}
{{- end -}}

{{/* The port on nodes, where one is named and the Service has one: (service, port). */}}
{{- define "baton.nodePort" -}}
{{- if and .port (ne .service.type "ClusterIP") }}, nodePort: {{ .port }}{{ end -}}
{{- end -}}

{{/* A NetworkPolicy: (root, component, ingress, egress: rules as YAML text). */}}
{{- define "baton.networkPolicy" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  {{- include "baton.metadata" (merge (dict "name" (printf "%s-%s" (include "baton.fullname" .root) .component)) .) | nindent 2 }}
spec:
  podSelector:
    matchLabels:
      {{- include "baton.selector" . | nindent 6 }}
  policyTypes: [Ingress, Egress]
  {{- with default "" .ingress | trim }}
  ingress:
    {{- . | nindent 4 }}
  {{- end }}
  {{- with default "" .egress | trim }}
  egress:
    {{- . | nindent 4 }}
  {{- end }}
{{- end -}}
