{{/* Pods of Ray: the same for Deployments and for a RayCluster, whose operator writes the commands itself. */}}

{{/* Where Ray's control store listens. */}}
{{- define "baton.rayAddress" -}}
{{- $ports := include "baton.ports" . | fromYaml -}}
{{- include "baton.fullname" . }}-{{ ternary "head-svc" "ray-head" .Values.kuberay.enabled }}:{{ $ports.ray }}
{{- end -}}

{{/* The Redis of Ray's control store with its scheme. */}}
{{- define "baton.rayRedisAddress" -}}
{{- $address := default (printf "%s-redis:6379" (include "baton.fullname" .)) .Values.kuberay.gcsFaultTolerance.redisAddress -}}
{{- contains "://" $address | ternary "" "redis://" }}{{ $address -}}
{{- end -}}

{{/* Room of a Ray node for workers by role, which the supervisor looks for: (root, component). */}}
{{- define "baton.rayRoom" -}}
{{- $group := .root.Values.workerGroup -}}
{{- if eq .component "workers" -}}
{{- dict "baton-prefill" ($group.prefill | int) "baton-decode" ($group.decode | int) | toJson -}}
{{- else -}}
{{- dict (printf "baton-%s" .component) 1 | toJson -}}
{{- end -}}
{{- end -}}

{{/* Parameters of `ray start`: (root, component, settings). KubeRay writes a shell command of them. */}}
{{- define "baton.rayParameters" -}}
{{- $ports := include "baton.ports" .root | fromYaml -}}
object-store-memory: "134217728"
disable-usage-stats: "true"
node-manager-port: {{ $ports.rayNode | quote }}
object-manager-port: {{ $ports.rayObjects | quote }}
{{- if eq .component "ray-head" }}
port: {{ $ports.ray | quote }}
num-cpus: "0"
num-gpus: "0"
include-dashboard: "false"
{{- else }}
num-gpus: {{ include "baton.gpus" . | quote }}
resources: {{ include "baton.rayRoom" . | quote | squote }}
{{- end }}
{{- end -}}

{{/* The command of a Ray node: (root, component, settings). */}}
{{- define "baton.rayCommand" -}}
{{- $command := list "ray" "start" "--block" "--node-ip-address=$(BATON_HOST)" -}}
{{- if eq .component "ray-head" -}}
{{- $command = append $command "--head" -}}
{{- else -}}
{{- $command = append $command (printf "--address=%s" (include "baton.rayAddress" .root)) -}}
{{- end -}}
{{- range $name, $value := include "baton.rayParameters" . | fromYaml -}}
{{- if eq $name "resources" }}{{ $value = include "baton.rayRoom" $ }}{{ end -}}
{{- $command = append $command (eq $value "true" | ternary (printf "--%s" $name) (printf "--%s=%s" $name $value)) -}}
{{- end -}}
{{- toJson $command -}}
{{- end -}}

{{- define "baton.rayEnv" -}}
- {name: RAY_AUTH_MODE, value: token}
- {name: RAY_AUTH_TOKEN_PATH, value: /run/baton/secrets/ray-token}
- {name: RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES, value: "1"}
- {name: RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO, value: "0"}
- {name: RAY_TMPDIR, value: /tmp/ray}
{{- if .Values.tls.internal.enabled }}
- {name: RAY_USE_TLS, value: "1"}
- {name: RAY_TLS_SERVER_CERT, value: /run/baton/tls/ray/tls.crt}
- {name: RAY_TLS_SERVER_KEY, value: /run/baton/tls/ray/tls.key}
- {name: RAY_TLS_CA_CERT, value: /run/baton/tls/ray/ca.crt}
{{- end }}
{{- end -}}

{{/* Ray's peers verify addresses, which are known when a pod starts: an init container makes the certificate. */}}
{{- define "baton.rayAuthoritySecret" -}}
{{- default (printf "%s-ray-authority" (include "baton.fullname" .)) .Values.tls.internal.rayAuthoritySecret -}}
{{- end -}}

{{/* (root, component, settings) */}}
{{- define "baton.rayCertificateInit" -}}
{{- if .root.Values.tls.internal.enabled }}
{{- $hosts := list "--host" "$(BATON_HOST)" -}}
{{- if eq .component "ray-head" }}{{ $hosts = append (append $hosts "--host") (include "baton.rayAddress" .root | splitList ":" | first) }}{{ end }}
- name: ray-certificate
  image: {{ include "baton.image" (dict "root" .root "image" "worker") | quote }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy | quote }}
  command: {{ concat (list "baton" "ray" "certificate" "--authority" "/run/baton/tls/ray-authority" "--out" "/run/baton/tls/ray") $hosts | toJson }}
  env:
    - {name: HOME, value: /tmp}
    - {name: BATON_HOST, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
  resources:
    requests: {cpu: 100m, memory: 128Mi}
    limits: {memory: 512Mi}
  securityContext:
    {{- toYaml .settings.containerSecurityContext | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: ray-authority, mountPath: /run/baton/tls/ray-authority, readOnly: true}
    - {name: ray-tls, mountPath: /run/baton/tls/ray}
{{- end }}
{{- end -}}

{{- define "baton.rayTlsMount" -}}
{{- if .Values.tls.internal.enabled }}
- {name: ray-tls, mountPath: /run/baton/tls/ray, readOnly: true}
{{- end }}
{{- end -}}

{{- define "baton.rayTlsVolumes" -}}
{{- if .Values.tls.internal.enabled }}
- name: ray-authority
  secret:
    secretName: {{ include "baton.rayAuthoritySecret" . | quote }}
    defaultMode: 0440
    items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]
- name: ray-tls
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
{{- end }}
{{- end -}}

{{/* How long the supervisor's own Ray node waits for a head that is started again; KubeRay sets it for the others. */}}
{{- define "baton.rayPatience" -}}
{{- if and .Values.kuberay.enabled .Values.kuberay.gcsFaultTolerance.enabled -}}
- {name: RAY_gcs_rpc_server_reconnect_timeout_s, value: "600"}
{{- end -}}
{{- end -}}

{{/* Probes of a Ray node, which ends by itself where Ray does: (port). */}}
{{- define "baton.rayProbes" -}}
startupProbe:
  tcpSocket: {port: {{ .port }}}
  periodSeconds: 5
  failureThreshold: 60
livenessProbe:
  tcpSocket: {port: {{ .port }}}
  periodSeconds: 10
  failureThreshold: 6
readinessProbe:
  tcpSocket: {port: {{ .port }}}
  periodSeconds: 5
{{- end -}}

{{- define "baton.rayHeadPod" -}}
{{- $ports := include "baton.ports" . | fromYaml -}}
{{- $context := dict "root" . "component" "ray-head" -}}
{{- $settings := include "baton.settings" $context | fromYaml -}}
{{- $context = merge $context (dict "settings" $settings) -}}
{{- $pod := dict
    "image" (include "baton.image" (dict "root" . "image" "worker"))
    "env" (printf "%s\n%s" (include "baton.env" $context) (include "baton.rayEnv" .))
    "ports" (printf "- {name: gcs-server, containerPort: %v}\n- {name: ray-node, containerPort: %v}" $ports.ray $ports.rayNode)
    "probes" (include "baton.rayProbes" (dict "port" "gcs-server"))
    "resources" (toYaml $settings.resources)
    "security" $settings.containerSecurityContext
    "mounts" (printf "%s%s\n- {name: shm, mountPath: /dev/shm}" (include "baton.secretMounts" $context) (include "baton.rayTlsMount" .))
    "volumes" (printf "%s\n%s%s\n- name: shm\n  emptyDir: {medium: Memory, sizeLimit: 512Mi}" (include "baton.secretsVolume" $context) (include "baton.tlsVolumes" $context) (include "baton.rayTlsVolumes" .))
    "init" (include "baton.rayCertificateInit" $context)
    "grace" 30 -}}
{{- if not .Values.kuberay.enabled }}{{ $_ := set $pod "command" (include "baton.rayCommand" $context | fromJsonArray) }}{{ end -}}
{{- include "baton.podTemplate" (merge $context $pod) -}}
{{- end -}}

{{/* A Ray node with GPUs, where Baton's workers run: (root, component: workers, prefill or decode). */}}
{{- define "baton.rayWorkerPod" -}}
{{- $values := .root.Values -}}
{{- $ports := include "baton.ports" .root | fromYaml -}}
{{- $settings := include "baton.settings" . | fromYaml -}}
{{- $context := dict "root" .root "component" .component "settings" $settings -}}
{{- $pod := dict
    "image" (include "baton.image" (dict "root" .root "image" "worker"))
    "config" "supervisor"
    "preStop" (list "baton" "ray" "stop-workers" "--within" (toString $values.lifecycle.longestGenerationSeconds))
    "env" (printf "%s\n%s" (include "baton.workerEnv" $context) (include "baton.rayEnv" .root))
    "ports" (printf "- {name: ray-node, containerPort: %v}\n%s" $ports.rayNode (include "baton.rayMetricsPorts" $context))
    "probes" (include "baton.rayProbes" (dict "port" "ray-node"))
    "resources" (include "baton.workerResources" $context)
    "security" (include "baton.workerSecurity" $context | fromYaml)
    "mounts" (printf "%s%s" (include "baton.workerMounts" $context) (include "baton.rayTlsMount" .root))
    "volumes" (printf "%s%s" (include "baton.workerVolumes" $context) (include "baton.rayTlsVolumes" .root))
    "init" (printf "%s\n%s" (include "baton.rayCertificateInit" $context) (include "baton.modelInit" (merge (dict "component" "supervisor") $context)))
    "grace" (add $values.lifecycle.longestGenerationSeconds $values.lifecycle.marginSeconds) -}}
{{- if not $values.kuberay.enabled }}{{ $_ := set $pod "command" (include "baton.rayCommand" $context | fromJsonArray) }}{{ end -}}
{{- include "baton.podTemplate" (merge $context $pod) -}}
{{- end -}}

{{- define "baton.rayMetricsPorts" -}}
{{- $ports := include "baton.ports" .root | fromYaml -}}
{{- range $index := until (include "baton.workersPerPod" . | int) }}
- {name: metrics-{{ $index }}, containerPort: {{ add $ports.workerMetrics $index }}}
{{- end }}
{{- end -}}
