{{/* The pod template of every component. Those who include it bring what differs, as YAML text.
     (root, component, settings, image, command; of the container: env, ports, probes, preStop, mounts, resources;
     of the pod: volumes, init, grace; config: component whose file it reads) */}}
{{- define "baton.podTemplate" -}}
{{- $root := .root -}}
{{- $settings := .settings -}}
metadata:
  labels:
    {{- include "baton.labels" . | nindent 4 }}
    {{- with $settings.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- $notes := deepCopy $settings.annotations }}
  {{- if .config }}
  {{- $notes = set $notes "checksum/config" (include "baton.config" (dict "root" $root "component" .config) | sha256sum) }}
  {{- end }}
  {{- with include "baton.secretsChecksum" . }}
  {{- $notes = set $notes "checksum/secrets" . }}
  {{- end }}
  {{- with merge $notes $root.Values.commonAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "baton.serviceAccount" $root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  securityContext:
    {{- toYaml $settings.podSecurityContext | nindent 4 }}
  terminationGracePeriodSeconds: {{ .grace }}
  {{- with $settings.resourceClaims }}
  resourceClaims:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- include "baton.placement" . | trim | nindent 2 }}
  {{- with printf "%s\n%s" (empty $settings.extraInitContainers | ternary "" (toYaml $settings.extraInitContainers)) (default "" .init) | trim }}
  initContainers:
    {{- . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .component }}
      image: {{ .image | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      {{- with .command }}
      command: {{ toJson . }}
      {{- end }}
      {{- with $settings.extraArgs }}
      args: {{ toJson . }}
      {{- end }}
      env:
        - {name: HOME, value: /tmp}
        {{- with .env | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with $settings.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $settings.extraEnvFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        {{- .ports | trim | nindent 8 }}
      {{- .probes | trim | nindent 6 }}
      {{- with .preStop }}
      lifecycle:
        preStop:
          exec: {command: {{ toJson . }}}
      {{- end }}
      resources:
        {{- .resources | trim | nindent 8 }}
      securityContext:
        {{- toYaml .security | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        {{- if .config }}
        - {name: config, mountPath: /etc/baton, readOnly: true}
        {{- end }}
        {{- .mounts | trim | nindent 8 }}
        {{- with $settings.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with $settings.extraContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: {{ $settings.tmpSizeLimit }}}
    {{- if .config }}
    - name: config
      configMap: {name: {{ include "baton.fullname" $root }}-{{ .config }}}
    {{- end }}
    {{- .volumes | trim | nindent 4 }}
    {{- with $settings.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* Where pods may run: (root, component, settings). */}}
{{- define "baton.placement" -}}
{{- $settings := .settings -}}
{{- $selector := dict "matchLabels" (include "baton.selector" . | fromYaml) -}}
{{- range $key := list "nodeSelector" "tolerations" "affinity" }}
{{- with index $settings $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- range $key := list "priorityClassName" "runtimeClassName" "schedulerName" }}
{{- with index $settings $key }}
{{ $key }}: {{ . }}
{{- end }}
{{- end }}
{{- if or $settings.topologyKey $settings.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- with $settings.topologyKey }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      {{- toYaml $selector | nindent 6 }}
  {{- end }}
  {{- range $settings.topologySpreadConstraints }}
  - {{- toYaml (merge (dict) . (dict "labelSelector" $selector)) | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Probes on the admin HTTP port: (startSeconds). */}}
{{- define "baton.probes" -}}
startupProbe:
  httpGet: {path: /health, port: admin}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: {{ div (add .startSeconds 4) 5 | int }}
livenessProbe:
  httpGet: {path: /health, port: admin}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /ready, port: admin}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
{{- end -}}

{{/* Variables of every process of Baton's. */}}
{{- define "baton.env" -}}
- {name: BATON_HOST, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
- {name: BATON_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
{{- end -}}

{{/* A PodDisruptionBudget: (root, component, budget). */}}
{{- define "baton.pdb" -}}
{{- if .budget.enabled }}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "baton.metadata" (merge (dict "name" (printf "%s-%s" (include "baton.fullname" .root) .component)) .) | nindent 2 }}
spec:
  maxUnavailable: {{ .budget.maxUnavailable }}
  selector:
    matchLabels:
      {{- include "baton.selector" . | nindent 6 }}
{{- end }}
{{- end -}}
