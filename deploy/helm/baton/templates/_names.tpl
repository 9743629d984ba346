{{/* Names, labels and images. */}}

{{- define "baton.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What releases have in common that serve together; also the namespace in Redis. */}}
{{- define "baton.cluster" -}}
{{- default (include "baton.fullname" .) .Values.cluster.name -}}
{{- end -}}

{{/* Labels that select the pods of one component of this release: (root, component). */}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Labels that select pods of the cluster, whichever release they are of. */}}
{{- define "baton.clusterSelector" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/part-of: {{ include "baton.cluster" . }}
{{- end -}}

{{/* Labels of an object: (root, component). */}}
{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/part-of: {{ include "baton.cluster" .root }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Metadata of an object: (root, component, name, annotations, labels). */}}
{{- define "baton.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "baton.labels" . | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (default dict .annotations) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Reference of an image: (root, image: router or worker). */}}
{{- define "baton.image" -}}
{{- $image := index .root.Values.image .image -}}
{{- with .root.Values.image.registry }}{{ . }}/{{ end -}}
{{- $image.repository }}:{{ default .root.Chart.AppVersion $image.tag }}
{{- with $image.digest }}@{{ . }}{{ end -}}
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

{{/* Settings of a component's pods, the common ones included, as YAML: (root, component). */}}
{{- define "baton.settings" -}}
{{- $values := .root.Values -}}
{{- $key := get (dict "workers" "workerGroup") .component | default .component -}}
{{- $own := eq .component "ray-head" | ternary $values.ray.head (index $values $key | default dict) -}}
{{- mergeOverwrite (deepCopy $values.pod) (deepCopy $own) | toYaml -}}
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
