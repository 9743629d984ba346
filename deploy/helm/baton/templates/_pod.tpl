{{/* The pod template of every component. Those who include it bring what differs, as YAML text.
     (root, component, settings, image, command; of the container: env, ports, probes, preStop, mounts, resources;
     of the pod: volumes, init, grace; config: component whose file it reads). What users add is merged over it. */}}
{{- define "baton.podTemplate" -}}
{{- $settings := .settings -}}
{{- $made := include "baton.ownPodTemplate" . | fromYaml -}}
{{- with get $made "Error" }}{{ fail . }}{{ end -}}
{{- $inits := dict "name" "initContainers" "keys" (list "name") -}}
{{- $first := merge (dict "base" $settings.extraInitContainers "over" (default list $made.spec.initContainers)) $inits -}}
{{- with include "baton.mergedList" $first | fromJsonArray }}{{ $_ := set $made.spec "initContainers" . }}{{ end -}}
{{- $container := dict "name" .component -}}
{{- range $name, $of := dict "env" "extraEnv" "envFrom" "extraEnvFrom" "args" "extraArgs" "volumeMounts" "extraVolumeMounts" -}}
{{- with index $settings $of }}{{ $_ := set $container $name . }}{{ end -}}
{{- end -}}
{{- $probes := dict -}}
{{- range $name, $numbers := $settings.probes -}}
{{- $kind := printf "%sProbe" $name -}}
{{- if and $numbers (hasKey (first $made.spec.containers) $kind) }}{{ $_ := set $probes $kind $numbers }}{{ end -}}
{{- end -}}
{{- $containers := prepend $settings.extraContainers (merge $container $probes) -}}
{{- $own := list -}}
{{- range $made.spec.initContainers -}}
{{- if and (eq .name "model") (eq $.root.Values.model.source "hub") }}{{ $own = append $own (merge (dict "name" "model") (omit $container "args" "name")) }}{{ end -}}
{{- end -}}
{{- $over := dict "containers" $containers "initContainers" (concat $own $settings.extraInitContainers) "volumes" $settings.extraVolumes -}}
{{- $rules := list -}}
{{- $selector := dict "matchLabels" (include "baton.selector" . | fromYaml) -}}
{{- range $settings.topologySpreadConstraints -}}
{{- $rules = append $rules (merge (dict) . (dict "labelSelector" $selector)) -}}
{{- end -}}
{{- $_ := set $over "topologySpreadConstraints" $rules -}}
{{- range $name := list "resourceClaims" "hostAliases" }}{{ $_ := set $over $name (index $settings $name) }}{{ end -}}
{{- range $name, $value := $over }}{{ if not $value }}{{ $_ := unset $over $name }}{{ end }}{{ end -}}
{{- include "baton.merged" (dict "base" $made "over" (dict "spec" $over)) | fromJson | toYaml -}}
{{- end -}}

{{/* The pod template without what users add to its lists. */}}
{{- define "baton.ownPodTemplate" -}}
{{- $root := .root -}}
{{- $settings := .settings -}}
metadata:
  labels:
    {{- include "baton.podLabels" (dict "root" $root "component" .component "labels" $settings.labels) | nindent 4 }}
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
  serviceAccountName: {{ include "baton.serviceAccount" $root | quote }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- include "baton.pullSecrets" $root | nindent 2 }}
  securityContext:
    {{- toYaml $settings.podSecurityContext | nindent 4 }}
  terminationGracePeriodSeconds: {{ .grace }}
  {{- include "baton.placement" . | trim | nindent 2 }}
  {{- with default "" .init | trim }}
  initContainers:
    {{- . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .component | quote }}
      image: {{ .image | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy | quote }}
      {{- with .command }}
      command: {{ toJson . }}
      {{- end }}
      env:
        - {name: HOME, value: /tmp}
        {{- with .env | trim }}
        {{- . | nindent 8 }}
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
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: {{ $settings.tmpSizeLimit | quote }}}
    {{- if .config }}
    - name: config
      configMap: {name: {{ printf "%s-%s" (include "baton.fullname" $root) .config | quote }}}
    {{- end }}
    {{- .volumes | trim | nindent 4 }}
{{- end -}}

{{/* Where pods may run, and their network: (root, component, settings). */}}
{{- define "baton.placement" -}}
{{- $settings := .settings -}}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "dnsConfig" }}
{{- with index $settings $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- range $key := list "priorityClassName" "runtimeClassName" "schedulerName" }}
{{- with index $settings $key }}
{{ $key }}: {{ . | quote }}
{{- end }}
{{- end }}
{{- if $settings.hostNetwork }}
hostNetwork: true
{{- end }}
{{- with $settings.hostNetwork | ternary (default "ClusterFirstWithHostNet" $settings.dnsPolicy) $settings.dnsPolicy }}
dnsPolicy: {{ . }}
{{- end }}
{{- with $settings.topologyKey }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: {{ . | quote }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "baton.selector" $ | nindent 8 }}
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

{{/* Seconds that a stopping worker has, and a stopping router. */}}
{{- define "baton.workerGrace" -}}
{{ add .Values.lifecycle.longestGenerationSeconds .Values.lifecycle.marginSeconds }}
{{- end -}}
{{- define "baton.routerGrace" -}}
{{ add .Values.lifecycle.drainSeconds (include "baton.workerGrace" . | int) }}
{{- end -}}

{{/* Seconds until a rollout counts as failed, where an old pod ends before the new one loads: (root, stops). */}}
{{- define "baton.progressSeconds" -}}
{{ add .root.Values.modelLoadTimeout (.stops | int) 600 }}
{{- end -}}

{{/* Seconds that `helm --wait` may need: one worker after the other ends and loads, routers too. */}}
{{- define "baton.waitSeconds" -}}
{{- $one := add .Values.modelLoadTimeout (include "baton.workerGrace" . | int) 60 -}}
{{- $pods := list 1 -}}
{{- range $component := (include "baton.workerComponents" . | fromYaml).components -}}
{{- $role := include "baton.settings" (dict "root" $ "component" $component) | fromYaml -}}
{{- $pods = append $pods (int $role.replicas) -}}
{{- end -}}
{{ mul $one (max (first $pods) (index $pods 1) (last $pods)) }}
{{- end -}}

{{/* Where ports listen: at all addresses of the pod, of both families where the node has them; on the node's network
     at the pod's address alone: (settings). */}}
{{- define "baton.listenHost" -}}
{{ .settings.hostNetwork | ternary "valueFrom: {fieldRef: {fieldPath: status.podIP}}" "value: \"::\"" }}
{{- end -}}

{{/* Variables of every process of Baton's: (settings). */}}
{{- define "baton.env" -}}
- {name: BATON_HOST, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
- {name: BATON_LISTEN_HOST, {{ include "baton.listenHost" . }}}
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
  {{- with .budget.unhealthyPodEvictionPolicy }}
  # A pod that never becomes ready must not keep its node from being drained.
  unhealthyPodEvictionPolicy: {{ . }}
  {{- end }}
  selector:
    matchLabels:
      {{- include "baton.selector" . | nindent 6 }}
{{- end }}
{{- end -}}
