{{/* What the schema cannot say: values that do not fit each other. Each line of a list is one mistake. */}}

{{- define "baton.modelMistakes" -}}
{{- $model := .Values.model -}}
{{- if and (ne $model.source "demo") (not $model.servedName) }}
model.servedName is empty: clients need a name for a model that is not the demo model
{{- end }}
{{- if eq $model.source "s3" }}
model.source is s3, and the chart has no client for object stores: mount the bucket by its CSI driver and name the claim (model.source pvc), or fill a claim by a Job of your own
{{- end }}
{{- if and (eq $model.source "pvc") (not $model.pvc.claimName) }}
model.pvc.claimName is empty, and model.source is pvc
{{- end }}
{{- if and (eq $model.source "hostPath") (not $model.hostPath.path) }}
model.hostPath.path is empty, and model.source is hostPath
{{- end }}
{{- if and (eq $model.source "hub") (not $model.hub.id) }}
model.hub.id is empty, and model.source is hub
{{- end }}
{{- if and (eq $model.source "hub") (eq $model.hub.cache "pvc") (not $model.hub.claimName) (not $model.hub.claimSize) }}
model.hub.claimName is empty, and model.hub.cache is pvc; or set model.hub.claimSize
{{- end }}
{{- if and (eq $model.source "image") (not $model.image.reference) }}
model.image.reference is empty, and model.source is image
{{- end }}
{{- if and (eq .Values.kernelCache.type "pvc") (not .Values.kernelCache.claimName) (not .Values.kernelCache.claimSize) }}
kernelCache.claimName is empty, and kernelCache.type is pvc; or set kernelCache.claimSize
{{- end }}
{{- end -}}

{{- define "baton.workerMistakes" -}}
{{- $values := .Values -}}
{{- $transport := default "auto" $values.transfer.transport -}}
{{- if and (eq $values.topology "split") (eq $transport "ipc") }}
transfer.transport is ipc, which ends at a pod: with topology split use auto, nccl or grpc
{{- end }}
{{- if and (eq $transport "nccl") (ne (default "native" $values.transfer.kv_wire) "native") }}
transfer.kv_wire {{ $values.transfer.kv_wire }} goes through the host, transfer.transport nccl does not
{{- end }}
{{- range $component := (include "baton.workerComponents" . | fromYaml).components }}
{{- $role := include "baton.settings" (dict "root" $ "component" $component) | fromYaml }}
{{- $key := eq $component "workers" | ternary "workerGroup" $component }}
{{- $gpus := include "baton.gpus" (dict "root" $ "component" $component) | int }}
{{- $needed := include "baton.gpusNeeded" (dict "root" $ "component" $component) | int }}
{{- $workers := include "baton.workersPerPod" (dict "root" $ "component" $component) | int }}
{{- $engine := merge (dict) $role.engine $values.engine }}
{{- if and (gt $gpus 0) (eq (default "auto" $engine.device) "cpu") }}
{{ $key }}.gpu.count is {{ $gpus }}, and engine.device is cpu
{{- end }}
{{- if and (eq $gpus 0) (eq $transport "nccl") }}
{{ $key }}.gpu.count is 0, and transfer.transport nccl needs GPUs
{{- end }}
{{- $devices := $engine.tensor_parallel | default 1 | int }}
{{- if and (gt $gpus 0) (lt $gpus $devices) }}
{{ $key }}.gpu.count is {{ $gpus }}, and engine.tensor_parallel is {{ $devices }}: leave gpu.count out, or set it to {{ $needed }}
{{- else if and (gt $gpus 0) (lt $gpus $needed) (not $engine.gpu_workers) }}
{{ $key }}.gpu.count is {{ $gpus }} for {{ $workers }} workers{{ with gt $devices 1 }} of {{ $devices }} GPUs each{{ end }}: leave it out, or say by engine.gpu_workers how many share one
{{- end }}
{{- if gt $gpus $needed }}
{{ $key }}.gpu.count is {{ $gpus }}, and {{ $workers }} worker{{ gt $workers 1 | ternary "s use" " uses" }} no more than {{ $needed }}
{{- end }}
{{- if and (gt $gpus 1) (contains "mig-" $role.gpu.resource) }}
{{ $key }}.gpu.resource {{ $role.gpu.resource }}: a process sees one MIG instance, so {{ $key }}.gpu.count must be 1
{{- end }}
{{- with $role.autoscaling }}
{{- if and .enabled (gt (.minReplicas | int) (.maxReplicas | int)) }}
{{ $key }}.autoscaling.minReplicas is above maxReplicas
{{- end }}
{{- if and .enabled (not (.minReplicas | int)) (not .triggers) }}
{{ $key }}.autoscaling.minReplicas is 0: without workers routers are not ready, so no request comes that would ask for one; name what does in {{ $key }}.autoscaling.triggers
{{- end }}
{{- if and .enabled (include "baton.withRay" $) }}
{{ $key }}.autoscaling.enabled: with Ray the supervisor's configuration has the number of workers
{{- end }}
{{- end }}
{{- end }}
{{- with $values.router.autoscaling }}
{{- if and .enabled (gt (.minReplicas | int) (.maxReplicas | int)) }}
router.autoscaling.minReplicas is above maxReplicas
{{- end }}
{{- $processes := int (default 1 $values.router.config.processes) }}
{{- $cpu := dig "requests" "cpu" "1" $values.router.resources | toString }}
{{- $cores := hasSuffix "m" $cpu | ternary (divf (trimSuffix "m" $cpu | float64) 1000) (float64 $cpu) }}
{{- $aimed := divf (mulf $cores .targetCPUUtilization) 100 }}
{{- if and .enabled (gt (mulf $aimed 1.1) (float64 $processes)) }}
router.autoscaling.targetCPUUtilization {{ .targetCPUUtilization }} of router.resources.requests.cpu {{ $cpu }} is {{ $aimed }} cores, and router.config.processes {{ $processes }} use no more than {{ $processes }}: it would never add a pod
{{- end }}
{{- end }}
{{- if and $values.rdma.ipcLock (not $values.rdma.enabled) }}
rdma.ipcLock is for rdma.enabled
{{- end }}
{{- end -}}

{{- define "baton.accessMistakes" -}}
{{- $values := .Values -}}
{{- $tls := $values.tls -}}
{{- if and $values.redis.existingSecret $values.redis.url }}
redis.existingSecret and redis.url are both set
{{- end }}
{{- if not $values.secrets.draw }}
{{- $given := $values.secrets.values }}
{{- if and (not $values.secrets.existingSecret) (not (and $given.clusterSecret $given.prefixSecret $given.journalKey)) }}
secrets.draw is false: set secrets.existingSecret
{{- end }}
{{- if and (include "baton.bundledRedis" .) (not $given.redisPassword) }}
secrets.draw is false: set redis.existingSecret, or secrets.values.redisPassword for the bundled Valkey
{{- end }}
{{- end }}
{{- if and (not $values.redis.bundled.enabled) (not $values.redis.existingSecret) (not $values.redis.url) }}
no Redis: set redis.existingSecret, redis.url or redis.bundled.enabled
{{- end }}
{{- if not $values.router.enabled }}
{{- if include "baton.bundledRedis" . }}
router.enabled is false: set redis.existingSecret or redis.url to the Redis of the release that runs the routers
{{- end }}
{{- if not (or $values.secrets.existingSecret $values.secrets.values.clusterSecret) }}
router.enabled is false: set secrets.existingSecret to the secrets of the release that runs the routers
{{- end }}
{{- if not $values.cluster.name }}
router.enabled is false: set cluster.name to that of the release that runs the routers
{{- end }}
{{- end }}
{{- with $values.auth }}
{{- if and .enabled (not .existingSecret) (not .tenantsSecret) }}
auth.existingSecret is empty, and auth.enabled is true: set it, or auth.tenantsSecret
{{- end }}
{{- if and .existingSecret .tenantsSecret }}
auth.existingSecret and auth.tenantsSecret are both set
{{- end }}
{{- if and .enabled .tenantsSecret $values.test.enabled $values.router.enabled (not $values.test.apiKeySecret) }}
test.apiKeySecret is empty, and auth.tenantsSecret holds only hashes of keys; or set test.enabled to false
{{- end }}
{{- end }}
{{- if and $values.redis.caSecret (not $values.redis.existingSecret) (not $values.redis.url) }}
redis.caSecret is for redis.existingSecret or redis.url
{{- end }}
{{- if and $values.tracing.headersSecret (not $values.tracing.endpoint) }}
tracing.headersSecret is for tracing.endpoint
{{- end }}
{{- range $name := list "public" "internal" }}
{{- $one := index $tls $name }}
{{- if and $one.enabled (eq (empty $one.existingSecret) (not $one.certManager)) }}
tls.{{ $name }}.enabled needs one of tls.{{ $name }}.existingSecret and tls.{{ $name }}.certManager
{{- end }}
{{- end }}
{{- if and $tls.public.enabled $tls.public.certManager (not $tls.public.issuerRef.name) }}
tls.public.issuerRef.name is empty, and tls.public.certManager is true
{{- end }}
{{- if and $tls.public.enabled (not $tls.public.serviceNames) (not $tls.public.dnsNames) }}
tls.public.dnsNames is empty, and tls.public.serviceNames is false
{{- end }}
{{- if and $tls.public.clientCASecret (not $tls.public.enabled) }}
tls.public.clientCASecret is for tls.public.enabled
{{- end }}
{{- if and $tls.public.clientCASecret $values.test.enabled $values.router.enabled (not $values.test.tlsSecret) }}
test.tlsSecret is empty, and tls.public.clientCASecret asks clients for a certificate; or set test.enabled to false
{{- end }}
{{- if and (include "baton.withRay" .) $tls.internal.enabled (not $tls.internal.certManager) (not $tls.internal.rayAuthoritySecret) }}
tls.internal.rayAuthoritySecret is empty: Ray verifies addresses, so its pods make their certificates themselves; or set tls.internal.certManager
{{- end }}
{{- if and $tls.internal.rayAuthoritySecret (not $tls.internal.enabled) }}
tls.internal.rayAuthoritySecret is for tls.internal.enabled
{{- end }}
{{- if and $tls.internal.csiDriver (not $tls.internal.certManager) }}
tls.internal.csiDriver is for tls.internal.certManager
{{- end }}
{{- $fault := $values.kuberay.gcsFaultTolerance }}
{{- if and $values.kuberay.enabled $fault.enabled }}
{{- if ne (empty $fault.redisAddress) (empty $fault.existingSecret) }}
kuberay.gcsFaultTolerance needs both redisAddress and existingSecret, or neither
{{- end }}
{{- if and $fault.username (not $fault.redisAddress) }}
kuberay.gcsFaultTolerance.username is for kuberay.gcsFaultTolerance.redisAddress
{{- end }}
{{- if and (not $fault.redisAddress) (not (include "baton.bundledRedis" .)) }}
kuberay.gcsFaultTolerance.redisAddress is empty, and there is no bundled Valkey
{{- end }}
{{- if and (not $fault.redisAddress) (include "baton.bundledRedis" .) $tls.internal.enabled }}
kuberay.gcsFaultTolerance.redisAddress is empty: Ray cannot use the bundled Valkey with tls.internal.enabled
{{- end }}
{{- end }}
{{- end -}}

{{- define "baton.outsideMistakes" -}}
{{- $values := .Values -}}
{{- if and $values.monitoring.serviceMonitor.enabled $values.monitoring.podMonitor.enabled }}
monitoring.serviceMonitor.enabled and monitoring.podMonitor.enabled would count all twice
{{- end }}
{{- $http := include "baton.httpPort" . | int }}
{{- if eq $http ($values.router.service.grpcPort | int) }}
router.service.httpPort and router.service.grpcPort are both {{ $http }}
{{- end }}
{{- if and $values.ingress.enabled (not $values.ingress.hosts) }}
ingress.hosts is empty, and ingress.enabled is true
{{- end }}
{{- range $host := $values.ingress.enabled | ternary $values.ingress.hosts list }}
{{- if and $values.ingress.grpc.enabled (has $host $values.ingress.grpc.hosts) }}
ingress.hosts and ingress.grpc.hosts both have {{ $host }}: gRPC needs a host of its own
{{- end }}
{{- end }}
{{- $routes := or $values.gateway.httpRoute.enabled $values.gateway.grpcRoute.enabled }}
{{- if and $routes $values.tls.public.enabled (not $values.gateway.backendTLSPolicy.enabled) }}
gateway.backendTLSPolicy.enabled is false, and tls.public.enabled is true: a gateway would speak plaintext to routers
{{- end }}
{{- if and $values.gateway.backendTLSPolicy.enabled (not (and $routes $values.tls.public.enabled)) }}
gateway.backendTLSPolicy.enabled is for a route and tls.public.enabled
{{- end }}
{{- if and $values.ingress.grpc.enabled (not $values.ingress.grpc.hosts) }}
ingress.grpc.hosts is empty, and ingress.grpc.enabled is true
{{- end }}
{{- if and (or $values.gateway.httpRoute.enabled $values.gateway.grpcRoute.enabled) (not $values.gateway.parentRefs) }}
gateway.parentRefs is empty, and a route is enabled
{{- end }}
{{- end -}}

{{- define "baton.strictMistakes" -}}
{{- $values := .Values -}}
{{- $router := $values.router.enabled -}}
{{- if $values.security.strict }}
{{- if not $values.secrets.existingSecret }}
security.strict: secrets.existingSecret is empty
{{- end }}
{{- if include "baton.bundledRedis" . }}
security.strict: the bundled Valkey is for trials: set redis.existingSecret
{{- else if not $values.redis.existingSecret }}
security.strict: redis.existingSecret is empty, and redis.url has no password
{{- end }}
{{- $fault := $values.kuberay.gcsFaultTolerance }}
{{- if and $values.kuberay.enabled $fault.enabled $fault.redisAddress (not (hasPrefix "rediss://" $fault.redisAddress)) }}
security.strict: kuberay.gcsFaultTolerance.redisAddress is without TLS: rediss://host:port
{{- end }}
{{- if not $values.tls.internal.enabled }}
security.strict: tls.internal.enabled is false
{{- end }}
{{- if and $router (not $values.tls.public.enabled) }}
security.strict: tls.public.enabled is false
{{- end }}
{{- if and $router (not $values.auth.enabled) }}
security.strict: auth.enabled is false
{{- end }}
{{- $collector := $values.tracing.endpoint }}
{{- if and (hasPrefix "http://" $collector) (not (regexMatch "^http://(localhost|127\\.0\\.0\\.1|\\[::1\\])([:/]|$)" $collector)) }}
security.strict: tracing.endpoint is without TLS: https://host:port
{{- end }}
{{- if and (eq $values.model.source "hub") (not (regexMatch "^[0-9a-f]{40}$" $values.model.hub.revision)) }}
security.strict: model.hub.revision {{ $values.model.hub.revision }} moves: name a commit, all 40 digits of it
{{- end }}
{{- if not $values.networkPolicy.enabled }}
security.strict: networkPolicy.enabled is false
{{- end }}
{{- if not $values.image.router.digest }}
security.strict: image.router.digest is empty
{{- end }}
{{- if not $values.image.worker.digest }}
security.strict: image.worker.digest is empty
{{- end }}
{{- end }}
{{- end -}}
