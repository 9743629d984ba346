{{/* Names, labels and images. */}}

{{- define "baton.name" -}}
{{- default .Chart.Name .Values.nameOverride -}}
{{- end -}}

{{/* Prefix of the names of all objects, at most 40 characters; a longer one ends in its digest, so that two stay two.
     Services' names begin with a letter and have no dots; those of releases may be otherwise. */}}
{{- define "baton.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- $name := include "baton.name" . -}}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- $full = regexReplaceAll "^([0-9])" ($full | replace "." "-") "b${1}" -}}
{{- if gt (len $full) 40 -}}
{{- $full = printf "%s-%s" ($full | trunc 31 | trimSuffix "-") ($full | sha256sum | trunc 8) -}}
{{- end -}}
{{- $full -}}
{{- end -}}
{{- end -}}

{{/* What releases have in common that serve together; also the namespace in Redis. */}}
{{- define "baton.cluster" -}}
{{- default (include "baton.fullname" .) .Values.cluster.name -}}
{{- end -}}

{{/* Labels that select the pods of this copy of the chart. Names of objects are unique in a namespace, so their prefix
     tells two copies apart whatever the release, its charts and their overrides are called. */}}
{{- define "baton.copySelector" -}}
app.kubernetes.io/name: {{ include "baton.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
baton/prefix: {{ include "baton.fullname" . | quote }}
{{- end -}}

{{/* Labels that select the pods of one component of this copy of the chart: (root, component). */}}
{{- define "baton.selector" -}}
{{ include "baton.copySelector" .root }}
app.kubernetes.io/component: {{ .component | quote }}
{{- end -}}

{{/* Labels that select pods of the cluster, whichever release they are of. */}}
{{- define "baton.clusterSelector" -}}
baton/cluster: {{ include "baton.cluster" . | quote }}
{{- end -}}

{{/* Labels of pods: (root, component, labels). Those that select them cannot be replaced. A version of the chart is not
     among them, since a change of a pod's labels replaces the pod. */}}
{{- define "baton.podLabels" -}}
{{- $selecting := merge (include "baton.selector" . | fromYaml) (include "baton.clusterSelector" .root | fromYaml) -}}
{{- $own := dict "app.kubernetes.io/part-of" (include "baton.cluster" .root) -}}
{{- mergeOverwrite $own (deepCopy .root.Values.commonLabels) (deepCopy (default dict .labels)) $selecting | toYaml -}}
{{- end -}}

{{/* Labels of an object: (root, component, labels). */}}
{{- define "baton.labels" -}}
{{- $chart := printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" -}}
{{- $own := dict
    "app.kubernetes.io/version" .root.Chart.AppVersion
    "app.kubernetes.io/managed-by" .root.Release.Service
    "helm.sh/chart" $chart -}}
{{- mergeOverwrite $own (include "baton.podLabels" . | fromYaml) | toYaml -}}
{{- end -}}

{{/* Metadata of an object: (root, component, name, annotations, labels). */}}
{{- define "baton.metadata" -}}
name: {{ .name | quote }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- include "baton.labels" . | nindent 2 }}
{{- with merge (dict) (default dict .annotations) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* An image from the registry of `global.imageRegistry`, where that is set: (root, image). */}}
{{- define "baton.mirrored" -}}
{{- $registry := .root.Values.global.imageRegistry -}}
{{- if $registry -}}
{{- $parts := splitList "/" .image -}}
{{- $host := first $parts -}}
{{- if and (gt (len $parts) 1) (or (contains "." $host) (contains ":" $host) (eq $host "localhost")) }}{{ $parts = rest $parts }}{{ end -}}
{{- printf "%s/%s" (trimSuffix "/" $registry) (join "/" $parts) -}}
{{- else -}}
{{- .image -}}
{{- end -}}
{{- end -}}

{{/* Reference of an image: (root, image: router or worker). With a digest the chart's own version is no part of it, so
     that another chart with the same images replaces no pod. */}}
{{- define "baton.image" -}}
{{- $image := index .root.Values.image .image -}}
{{- $name := $image.repository -}}
{{- with .root.Values.image.registry }}{{ $name = printf "%s/%s" . $name }}{{ end -}}
{{- include "baton.mirrored" (dict "root" .root "image" $name) -}}
{{- $tag := $image.tag -}}
{{- if not $image.digest }}{{ $tag = default .root.Chart.AppVersion $tag }}{{ end -}}
{{- with $tag }}:{{ . }}{{ end -}}
{{- with $image.digest }}@{{ . }}{{ end -}}
{{- end -}}

{{/* Secrets with credentials of registries, of this chart and of all charts of the release. */}}
{{- define "baton.pullSecrets" -}}
{{- $names := list -}}
{{- range concat .Values.image.pullSecrets (default list .Values.global.imagePullSecrets) -}}
{{- $names = append $names (kindIs "string" . | ternary . (get (kindIs "map" . | ternary . dict) "name")) -}}
{{- end -}}
{{- with $names | compact | uniq }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Port of HTTP of the public Service. */}}
{{- define "baton.httpPort" -}}
{{ default (ternary 443 80 .Values.tls.public.enabled) (.Values.router.service.httpPort | int) }}
{{- end -}}

{{- define "baton.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "baton.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* "true" where Ray runs the workers. */}}
{{- define "baton.withRay" -}}
{{- if or .Values.ray.enabled .Values.kuberay.enabled }}true{{ end -}}
{{- end -}}

{{/* "true" where the release runs the bundled Valkey. */}}
{{- define "baton.bundledRedis" -}}
{{- if and .Values.redis.bundled.enabled (not .Values.redis.existingSecret) (not .Values.redis.url) }}true{{ end -}}
{{- end -}}

{{/* Names of the workers' components, as a list under `components`. */}}
{{- define "baton.workerComponents" -}}
components: {{ ternary (list "workers") (list "prefill" "decode") (eq .Values.topology "node") | toJson }}
{{- end -}}

{{/* Settings of a component's pods, the common ones included, as YAML: (root, component). Variables, volumes and mounts
     of the component come behind the common ones; other lists take their place. */}}
{{- define "baton.settings" -}}
{{- $values := .root.Values -}}
{{- $key := get (dict "workers" "workerGroup") .component | default .component -}}
{{- $own := eq .component "ray-head" | ternary $values.ray.head (index $values $key | default dict) -}}
{{- $settings := mergeOverwrite (deepCopy $values.pod) (deepCopy $own) -}}
{{- range list "extraEnv" "extraEnvFrom" "extraVolumes" "extraVolumeMounts" "hostAliases" -}}
{{- $_ := set $settings . (concat (index $values.pod .) (index $own . | default list)) -}}
{{- end -}}
{{- $variables := list -}}
{{- range $settings.extraEnv -}}
{{- $variables = append $variables (hasKey . "value" | ternary (merge (dict "value" (toString .value)) .) .) -}}
{{- end -}}
{{- $_ := set $settings "extraEnv" $variables -}}
{{- toYaml $settings -}}
{{- end -}}

{{/* Ports of containers. Those of workers are the first of sixteen: a pod's second worker has the next. */}}
{{- define "baton.ports" -}}
http: 8000
grpc: 50051
adminGrpc: 50052
adminHttp: 8001
worker: 50060
transfer: 50100
frames: 50140
workerMetrics: 9400
redis: 6379
ray: 6379
rayNode: 6390
rayObjects: 6391
{{- end -}}
