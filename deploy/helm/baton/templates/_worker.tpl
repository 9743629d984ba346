{{/* Worker pods: `workers` (a group of both roles), `prefill` and `decode`. */}}

{{/* Workers of a pod: (root, component). */}}
{{- define "baton.workersPerPod" -}}
{{- if eq .component "workers" }}{{ add .root.Values.workerGroup.prefill .root.Values.workerGroup.decode }}{{ else }}1{{ end -}}
{{- end -}}

{{/* GPUs that a pod's workers have, those of each counted: (root, component). */}}
{{- define "baton.gpusNeeded" -}}
{{- $settings := include "baton.settings" . | fromYaml -}}
{{- $engine := merge (dict) $settings.engine .root.Values.engine -}}
{{- mul (include "baton.workersPerPod" .) ($engine.tensor_parallel | default 1) -}}
{{- end -}}

{{/* GPUs of a pod: as many as its workers have where no number is set, none on a CPU: (root, component). */}}
{{- define "baton.gpus" -}}
{{- $settings := include "baton.settings" . | fromYaml -}}
{{- $engine := merge (dict) $settings.engine .root.Values.engine -}}
{{- if not (kindIs "invalid" $settings.gpu.count) }}{{ $settings.gpu.count | int }}
{{- else if eq (default "auto" $engine.device) "cpu" }}0
{{- else }}{{ include "baton.gpusNeeded" . }}{{ end -}}
{{- end -}}

{{/* Index of a pod's first decode worker, which prefill workers come before: (root, component). */}}
{{- define "baton.firstDecode" -}}
{{- if eq .component "workers" }}{{ .root.Values.workerGroup.prefill }}{{ else }}{{ eq .component "decode" | ternary 0 1 }}{{ end -}}
{{- end -}}

{{/* Container ports; links are opened to decode workers: (root, component). */}}
{{- define "baton.workerPorts" -}}
{{- $ports := include "baton.ports" .root | fromYaml -}}
{{- $firstDecode := include "baton.firstDecode" . | int -}}
- {name: admin, containerPort: {{ $ports.adminHttp }}}
{{- range $index := until (include "baton.workersPerPod" . | int) }}
- {name: grpc-{{ $index }}, containerPort: {{ add $ports.worker $index }}}
{{- if ge $index $firstDecode }}
- {name: transfer-{{ $index }}, containerPort: {{ add $ports.transfer $index }}}
{{- end }}
{{- if eq $.component "workers" }}
- {name: metrics-{{ $index }}, containerPort: {{ add $ports.workerMetrics $index }}}
{{- end }}
{{- end }}
{{- end -}}

{{/* Names of the ports that serve metrics: (root, component). Ray nodes have no admin port. */}}
{{- define "baton.metricsPorts" -}}
{{- $names := list -}}
{{- if not (include "baton.withRay" .root) }}{{ $names = list "admin" }}{{ end -}}
{{- if or (eq .component "workers") (include "baton.withRay" .root) -}}
{{- range $index := until (include "baton.workersPerPod" . | int) -}}
{{- $names = append $names (printf "metrics-%d" $index) -}}
{{- end -}}
{{- end -}}
names: {{ toJson $names }}
{{- end -}}

{{/* CPU, memory, GPUs and RDMA devices: (root, component, settings). */}}
{{- define "baton.workerResources" -}}
{{- $resources := deepCopy .settings.resources -}}
{{- $devices := dict -}}
{{- $gpus := include "baton.gpus" . | int -}}
{{- if $gpus }}{{ $_ := set $devices .settings.gpu.resource (toString $gpus) }}{{ end -}}
{{- with .root.Values.rdma }}{{ if .enabled }}{{ $_ := set $devices .resource (toString .count) }}{{ end }}{{ end -}}
{{- mergeOverwrite $resources (dict "limits" $devices "requests" (deepCopy $devices)) | toYaml -}}
{{- end -}}

{{/* Security of a worker's container: (root, settings). */}}
{{- define "baton.workerSecurity" -}}
{{- $security := deepCopy .settings.containerSecurityContext -}}
{{- if .root.Values.rdma.ipcLock -}}
{{- $had := dig "capabilities" "add" (list) $security -}}
{{- $security = mergeOverwrite $security (dict "capabilities" (dict "add" (append $had "IPC_LOCK" | uniq))) -}}
{{- end -}}
{{- toYaml $security -}}
{{- end -}}

{{- define "baton.workerEnv" -}}
{{ include "baton.env" . }}
- {name: OMP_NUM_THREADS, value: "1"}
{{- range $name, $value := .root.Values.nccl.env }}
- {name: {{ $name | quote }}, value: {{ $value | quote }}}
{{- end }}
{{- end -}}

{{- define "baton.workerMounts" -}}
{{ include "baton.secretMounts" . }}
- {name: shm, mountPath: /dev/shm}
- {name: kernels, mountPath: /var/cache/baton/kernels}
{{- include "baton.modelMounts" . }}
{{- end -}}

{{/* (root, component, settings) */}}
{{- define "baton.workerVolumes" -}}
{{- $kernels := .root.Values.kernelCache -}}
{{ include "baton.secretsVolume" . }}
{{- include "baton.tlsVolumes" . }}
{{- include "baton.modelVolumes" . }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .settings.shmSize | quote }}}
- name: kernels
  {{- if eq $kernels.type "pvc" }}
  persistentVolumeClaim: {claimName: {{ include "baton.kernelClaim" .root | quote }}}
  {{- else if eq $kernels.type "hostPath" }}
  hostPath: {path: {{ $kernels.hostPath | quote }}, type: Directory}
  {{- else }}
  emptyDir: {sizeLimit: {{ $kernels.sizeLimit | quote }}}
  {{- end }}
{{- end -}}

{{/* The pod template of a worker pod without Ray: (root, component). */}}
{{- define "baton.workerPod" -}}
{{- $values := .root.Values -}}
{{- $settings := include "baton.settings" . | fromYaml -}}
{{- $context := dict "root" .root "component" .component "settings" $settings -}}
{{- $command := list "baton" "worker" "--role" .component -}}
{{- if eq .component "workers" -}}
{{- $command = list "baton" "worker" "group" "--prefill" (toString $values.workerGroup.prefill) "--decode" (toString $values.workerGroup.decode) -}}
{{- end -}}
{{- $command = concat $command (list "--config" (printf "/etc/baton/%s.yaml" .component)) -}}
{{- include "baton.podTemplate" (merge $context (dict
    "image" (include "baton.image" (dict "root" .root "image" "worker"))
    "command" $command
    "config" .component
    "env" (include "baton.workerEnv" $context)
    "ports" (include "baton.workerPorts" $context)
    "probes" (include "baton.probes" (dict "startSeconds" $values.modelLoadTimeout))
    "resources" (include "baton.workerResources" $context)
    "security" (include "baton.workerSecurity" $context | fromYaml)
    "mounts" (include "baton.workerMounts" $context)
    "volumes" (include "baton.workerVolumes" $context)
    "init" (include "baton.modelInit" $context)
    "grace" (add $values.lifecycle.longestGenerationSeconds $values.lifecycle.marginSeconds)
)) -}}
{{- end -}}

{{/* Whether a KEDA ScaledObject has the number of pods of a component: (root, component). */}}
{{- define "baton.workersScaled" -}}
{{- $settings := include "baton.settings" . | fromYaml -}}
{{- if $settings.autoscaling.enabled }}true{{ end -}}
{{- end -}}
