{{- /* Names and labels */ -}}
{{- define "whippet.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "whippet.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- else if contains (include "whippet.name" .) .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "whippet.name" .) | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "whippet.selector" -}}
app.kubernetes.io/name: {{ include "whippet.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: server
{{- end -}}

{{- /* Whether several pods share one model: true or nothing */ -}}
{{- define "whippet.grouped" -}}
{{- if and .Values.leaderWorkerSet.enabled (gt (.Values.leaderWorkerSet.size | int) 1) }}true{{ end -}}
{{- end -}}

{{- define "whippet.ranksOfPod" -}}
{{- if include "whippet.grouped" . -}}
{{- div (.Values.tensorParallel | int) (.Values.leaderWorkerSet.size | int) -}}
{{- else -}}
{{- .Values.tensorParallel | int -}}
{{- end -}}
{{- end -}}

{{- /* Pods that take calls: of a group, the leader. Its controller sets the label. */ -}}
{{- define "whippet.servingSelector" -}}
{{ include "whippet.selector" . }}
{{- if include "whippet.grouped" . }}
leaderworkerset.sigs.k8s.io/worker-index: "0"
{{- end }}
{{- end -}}

{{- /* The controller makes a headless Service with the LeaderWorkerSet's name, by which the pods of a group find their
       leader before it is ready. The Service of the data port has the release's name already. The name is short, since
       names of pods are made of it, and labels of these hold at most 63 characters. */ -}}
{{- define "whippet.setName" -}}
{{- if include "whippet.grouped" . -}}
{{- printf "%s-group" (include "whippet.fullname" . | trunc 42 | trimSuffix "-") -}}
{{- else -}}
{{- include "whippet.fullname" . -}}
{{- end -}}
{{- end -}}

{{- define "whippet.redisSelector" -}}
app.kubernetes.io/name: {{ include "whippet.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: redis
{{- end -}}

{{- /* Metadata of an object. Call with (dict "root" $ "name" "…" "component" "…" "annotations" (dict …)) */ -}}
{{- define "whippet.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  app.kubernetes.io/name: {{ include "whippet.name" .root }}
  app.kubernetes.io/instance: {{ .root.Release.Name }}
  app.kubernetes.io/component: {{ .component | default "server" }}
  app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
  helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
  {{- with merge (dict) (.labels | default dict) .root.Values.commonLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "whippet.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "whippet.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{- define "whippet.image" -}}
{{- with .Values.image -}}
{{- if .registry }}{{ .registry }}/{{ end }}{{ .repository }}
{{- if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end -}}
{{- end -}}
{{- end -}}

{{- /* Seconds */ -}}
{{- define "whippet.drainTimeout" -}}
{{- with .Values.drain -}}
{{- if kindIs "invalid" .timeoutSeconds -}}
{{- ceil (divf .maxTokens .tokensPerSecond) | int -}}
{{- else -}}
{{- .timeoutSeconds | int -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "whippet.leastGrace" -}}
{{- add (.Values.drain.delaySeconds | int) (include "whippet.drainTimeout" . | int) 10 -}}
{{- end -}}

{{- define "whippet.grace" -}}
{{- if kindIs "invalid" .Values.terminationGracePeriodSeconds -}}
{{- include "whippet.leastGrace" . -}}
{{- else -}}
{{- .Values.terminationGracePeriodSeconds | int -}}
{{- end -}}
{{- end -}}

{{- define "whippet.leastStartup" -}}
{{- $reading := ceil (divf (mulf .Values.model.sizeGiB 1024) .Values.model.readMiBPerSecond) | int -}}
{{- add (.Values.startup.baseSeconds | int) (mul 2 $reading) -}}
{{- end -}}

{{- define "whippet.startup" -}}
{{- if kindIs "invalid" .Values.startup.budgetSeconds -}}
{{- include "whippet.leastStartup" . -}}
{{- else -}}
{{- .Values.startup.budgetSeconds | int -}}
{{- end -}}
{{- end -}}

{{- define "whippet.progressDeadline" -}}
{{- if kindIs "invalid" .Values.progressDeadlineSeconds -}}
{{- add (include "whippet.startup" . | int) 120 -}}
{{- else -}}
{{- .Values.progressDeadlineSeconds | int -}}
{{- end -}}
{{- end -}}

{{- /* Where the model lies */ -}}
{{- define "whippet.modelFolder" -}}
{{- if eq .Values.model.source "demo" -}}
/opt/whippet/{{ .Values.model.path }}
{{- else -}}
/model{{ with .Values.model.path }}/{{ . }}{{ end }}
{{- end -}}
{{- end -}}

{{- define "whippet.insecure" -}}
{{- if kindIs "invalid" .Values.auth.insecure -}}
{{- if and (eq .Values.model.source "demo") (not .Values.auth.tokens.existingSecret) (not .Values.tls.clientCA) }}true{{ end -}}
{{- else if .Values.auth.insecure -}}
true
{{- end -}}
{{- end -}}

{{- /* The smoke test asks the admin port where anybody may, or where values say so */ -}}
{{- define "whippet.smokeAdmin" -}}
{{- if kindIs "invalid" .Values.smoke.admin -}}
{{- include "whippet.insecure" . -}}
{{- else if .Values.smoke.admin -}}
true
{{- end -}}
{{- end -}}

{{- define "whippet.redisName" -}}
{{- printf "%s-redis" (include "whippet.fullname" .) -}}
{{- end -}}

{{- define "whippet.redisSecret" -}}
{{- if eq .Values.redis.mode "bundled" -}}
{{- include "whippet.redisName" . -}}
{{- else if eq .Values.redis.mode "external" -}}
{{- .Values.redis.existingSecret -}}
{{- end -}}
{{- end -}}

{{- /* The settings file of the server, and the one of its switches */ -}}
{{- define "whippet.config" -}}
{{- $ours := dict
      "model" (include "whippet.modelFolder" .)
      "listen" "0.0.0.0:50051"
      "admin-listen" "0.0.0.0:50052"
      "health-listen" "0.0.0.0:50053"
      "metrics-listen" "0.0.0.0:9090"
      "cache-dir" "/var/cache/whippet/kept"
      "log-level" .Values.logLevel
      "log" (dict "format" .Values.logFormat)
      "console" (dict "enabled" .Values.console.enabled)
      "drain" (dict "delay" .Values.drain.delaySeconds "timeout" (include "whippet.drainTimeout" . | int)) -}}
{{- if include "whippet.insecure" . }}{{ $_ := set $ours "insecure" true }}{{ end -}}
{{- with .Values.model.name }}{{ $_ := set $ours "model-name" . }}{{ end -}}
{{- if gt (.Values.tensorParallel | int) 1 }}{{ $_ := set $ours "tensor-parallel" (.Values.tensorParallel | int) }}{{ end -}}
{{- if include "whippet.grouped" . -}}
{{- $elsewhere := sub (.Values.tensorParallel | int) (include "whippet.ranksOfPod" . | int) | int -}}
{{- $_ := set $ours "engine" (dict "ranks-elsewhere" $elsewhere "ranks-listen" "0.0.0.0:50061" "ranks-secret-file" "/etc/whippet/ranks/secret") -}}
{{- end -}}
{{- with .Values.model.digest }}{{ $_ := set $ours "model-digest" . }}{{ end -}}
{{- if .Values.tls.existingSecret -}}
{{- $tls := dict "cert" "/etc/whippet/tls/tls.crt" "key" "/etc/whippet/tls/tls.key" -}}
{{- if .Values.tls.clientCA }}{{ $_ := set $tls "client-ca" "/etc/whippet/tls/ca.crt" }}{{ end -}}
{{- $_ := set $ours "tls" $tls -}}
{{- end -}}
{{- $auth := dict -}}
{{- if .Values.auth.tokens.existingSecret }}{{ $_ := set $auth "tokens-file" (printf "/etc/whippet/tokens/%s" .Values.auth.tokens.key) }}{{ end -}}
{{- if .Values.auth.tenants.existingSecret }}{{ $_ := set $auth "tenants-file" (printf "/etc/whippet/tenants/%s" .Values.auth.tenants.key) }}{{ end -}}
{{- if $auth }}{{ $_ := set $ours "auth" $auth }}{{ end -}}
{{- if ne .Values.redis.mode "disabled" -}}
{{- $cache := dict -}}
{{- if eq .Values.redis.mode "bundled" -}}
{{- $_ := set $cache "redis-url" (printf "rediss://whippet@%s:6379/0" (include "whippet.redisName" .)) -}}
{{- $_ := set $cache "redis-password-file" "/etc/whippet/redis/password" -}}
{{- $_ := set $cache "redis-ca-file" "/etc/whippet/redis/ca.crt" -}}
{{- $_ := set $cache "key-file" "/etc/whippet/redis/cache.keys" -}}
{{- else -}}
{{- $_ := set $cache "redis-url" .Values.redis.url -}}
{{- with .Values.redis.sentinels }}{{ $_ := set $cache "redis-sentinels" . }}{{ end -}}
{{- if .Values.redis.existingSecret }}{{ $_ := set $cache "redis-password-file" "/etc/whippet/redis/password" }}{{ end -}}
{{- if has "ca.crt" .Values.redis.files }}{{ $_ := set $cache "redis-ca-file" "/etc/whippet/redis/ca.crt" }}{{ end -}}
{{- if has "tls.crt" .Values.redis.files }}{{ $_ := set $cache "redis-cert-file" "/etc/whippet/redis/tls.crt" }}{{ end -}}
{{- if has "tls.key" .Values.redis.files }}{{ $_ := set $cache "redis-key-file" "/etc/whippet/redis/tls.key" }}{{ end -}}
{{- if .Values.redis.keySecret }}{{ $_ := set $cache "key-file" "/etc/whippet/cache-keys/cache.keys" }}{{ end -}}
{{- end -}}
{{- $_ := set $ours "cache" $cache -}}
{{- end -}}
{{- with .Values.traces.endpoint }}{{ $_ := set $ours "traces" (dict "endpoint" .) }}{{ end -}}
{{- range $key, $_ := .Values.config -}}
{{- if or (eq $key "optimizations") (and (hasKey $ours $key) (not (kindIs "map" (get $ours $key)))) -}}
{{- fail (printf "config.%s: the chart sets it itself; see its own values" $key) -}}
{{- end -}}
{{- end -}}
{{- range $key, $value := $ours -}}
{{- if kindIs "map" $value -}}
{{- range $leaf, $_ := $value -}}
{{- if hasKey (get $.Values.config $key | default dict) $leaf -}}
{{- fail (printf "config.%s.%s: the chart sets it itself; see its own values" $key $leaf) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml (mergeOverwrite (deepCopy .Values.config) $ours) -}}
{{- end -}}

{{- define "whippet.switches" -}}
{{- $switches := dict -}}
{{- range $name, $one := .Values.optimizations -}}
{{- $_ := set $switches (kebabcase $name) $one.enabled -}}
{{- end -}}
{{- toYaml (dict "optimizations" $switches "cache" (dict "semantic" (dict "mode" .Values.semanticMode))) -}}
{{- end -}}
