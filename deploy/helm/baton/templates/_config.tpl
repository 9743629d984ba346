{{/* The configuration files. They name files of secrets and hold none. */}}

{{/* What all files have in common, as YAML: (root, component). */}}
{{- define "baton.commonConfig" -}}
{{- $root := .root -}}
{{- $values := $root.Values -}}
model: {{ include "baton.modelPath" . | quote }}
served_model_name: {{ include "baton.servedName" $root | quote }}
cluster_secret_file: /run/baton/secrets/cluster-secret
prefix_secret_file: /run/baton/secrets/prefix-secret
require_tls: {{ $values.security.strict }}
drain_s: {{ $values.lifecycle.longestGenerationSeconds }}
start_timeout_s: {{ $values.modelLoadTimeout }}
log_level: {{ $values.logLevel }}
{{- with $values.tracing }}
{{- if .endpoint }}
tracing:
  otlp_endpoint: {{ .endpoint | quote }}
  sample_ratio: {{ .sampleRatio }}
  {{- if .headersSecret }}
  otlp_headers_file: /run/baton/secrets/otlp-headers
  {{- end }}
{{- end }}
{{- end }}
state:
  namespace: {{ include "baton.cluster" $root | quote }}
  {{- if include "baton.redisSecretName" $root }}
  redis_url_file: /run/baton/secrets/redis-url
  {{- else }}
  redis_url: {{ $values.redis.url | quote }}
  {{- end }}
  {{- if eq .component "router" }}
  journal_key_file: /run/baton/secrets/journal-key
  {{- end }}
{{- if eq $values.model.source "hub" }}
model_source:
  hub_id: {{ $values.model.hub.id | quote }}
  revision: {{ $values.model.hub.revision | quote }}
  files: {{ ternary "tokenizer" "all" (eq .component "router") }}
  {{- if $values.model.hub.existingSecret }}
  token_file: /run/baton/hub/hub-token
  {{- end }}
{{- end }}
{{- if or $values.tls.internal.enabled (and $values.tls.public.enabled (eq .component "router")) }}
tls:
  {{- if $values.tls.internal.enabled }}
  internal:
    cert_file: /run/baton/tls/internal/tls.crt
    key_file: /run/baton/tls/internal/tls.key
    ca_file: /run/baton/tls/internal/ca.crt
    domain: {{ include "baton.cluster" $root | lower | replace "_" "-" }}.baton.internal
  {{- end }}
  {{- if and $values.tls.public.enabled (eq .component "router") }}
  public:
    cert_file: /run/baton/tls/public/tls.crt
    key_file: /run/baton/tls/public/tls.key
    {{- if $values.tls.public.clientCASecret }}
    client_ca_file: /run/baton/tls/public/client-ca.crt
    {{- end }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "baton.routerConfig" -}}
{{- $ports := include "baton.ports" . | fromYaml -}}
{{- $common := include "baton.commonConfig" (dict "root" . "component" "router") | fromYaml -}}
{{- $router := dict "host" "::" "http_port" $ports.http "grpc_port" $ports.grpc "public_metrics" false
    "admin_host" "127.0.0.1" "admin_grpc_port" $ports.adminGrpc "admin_http_port" $ports.adminHttp
    "request_timeout_s" .Values.lifecycle.longestGenerationSeconds -}}
{{- with .Values.lifecycle.drainSeconds -}}
{{- /* So that all clients have left by the end of `drainSeconds`, those too that came before the Service knew. */ -}}
{{- $_ := set $router "connections" (dict "max_connection_age_s" (round (mulf 0.6 .) 1)) -}}
{{- end -}}
{{- $own := dict "router" (mergeOverwrite $router (deepCopy .Values.router.config)) -}}
{{- if .Values.auth.enabled -}}
{{- $file := empty .Values.auth.tenantsSecret | ternary "api-keys" "tenants" -}}
{{- $_ := set $own "auth" (dict (printf "%s_file" (snakecase $file)) (printf "/run/baton/secrets/%s" $file)) -}}
{{- else -}}
{{- /* Without keys a router that other machines reach starts only with `auth: none`. */ -}}
{{- $_ := set $own "auth" "none" -}}
{{- end -}}
{{- mergeOverwrite $common $own | toYaml -}}
{{- end -}}

{{/* The file of a workers' component: (root, component: workers, prefill, decode or supervisor). */}}
{{- define "baton.workerConfig" -}}
{{- $values := .root.Values -}}
{{- $ports := include "baton.ports" .root | fromYaml -}}
{{- $config := include "baton.commonConfig" . | fromYaml -}}
{{- $cache := dict "kernel_cache" "/var/cache/baton/kernels" -}}
{{- $links := dict "transfer_port" $ports.transfer "frames_port" $ports.frames -}}
{{- $worker := dict "port" $ports.worker "admin_http_port" $ports.adminHttp -}}
{{- $_ := set $config "transfer" (mergeOverwrite $links (deepCopy $values.transfer)) -}}
{{- $_ := set $config "worker" $worker -}}
{{- $engine := mergeOverwrite $cache (deepCopy $values.engine) -}}
{{- if or (eq .component "workers") (eq .component "supervisor") -}}
{{- $_ := set $config "worker_metrics_port" $ports.workerMetrics -}}
{{- end -}}
{{- if eq .component "supervisor" -}}
{{- $split := eq $values.topology "split" -}}
{{- if $split -}}
{{- $of := dict "prefill" (deepCopy $values.prefill.engine) "decode" (deepCopy $values.decode.engine) -}}
{{- $_ := set $config "engine_of_role" $of -}}
{{- else -}}
{{- $engine = mergeOverwrite $engine (deepCopy $values.workerGroup.engine) -}}
{{- end -}}
{{- $group := $values.workerGroup -}}
{{- $_ := set $config "prefill" (ternary $values.prefill.replicas (mul $group.replicas $group.prefill) $split | int) -}}
{{- $_ := set $config "decode" (ternary $values.decode.replicas (mul $group.replicas $group.decode) $split | int) -}}
{{- $_ := set $config "supervision" (dict "ray_address" (include "baton.rayAddress" .root)) -}}
{{- else -}}
{{- $role := eq .component "workers" | ternary $values.workerGroup (index $values .component | default dict) -}}
{{- $engine = mergeOverwrite $engine (deepCopy $role.engine) -}}
{{- end -}}
{{- $_ := set $config "engine" $engine -}}
{{- toYaml $config -}}
{{- end -}}

{{/* The file of a component, whichever it is: (root, component). */}}
{{- define "baton.config" -}}
{{- if eq .component "router" -}}
{{- include "baton.routerConfig" .root -}}
{{- else -}}
{{- include "baton.workerConfig" . -}}
{{- end -}}
{{- end -}}
