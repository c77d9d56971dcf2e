{{- /* A server, and the pods of a group that compute with it, share these parts. First: labels and annotations */ -}}
{{- define "whippet.podMetadata" -}}
labels:
  {{- include "whippet.selector" . | nindent 2 }}
  {{- with merge (dict) .Values.podLabels .Values.commonLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  checksum/config: {{ include "whippet.config" . | sha256sum }}
  {{- with .Values.model.manifest }}
  checksum/manifest: {{ . | sha256sum }}
  {{- end }}
  {{- with merge (dict) .Values.podAnnotations .Values.commonAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- /* The account of a pod, its user, and the nodes that it may run on */ -}}
{{- define "whippet.podSettings" -}}
serviceAccountName: {{ include "whippet.serviceAccountName" . }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
  {{- if kindIs "invalid" .Values.topologySpreadConstraints }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "whippet.selector" . | nindent 8 }}
  {{- else }}
  {{- toYaml .Values.topologySpreadConstraints | nindent 2 }}
  {{- end }}
{{- end -}}

{{- /* Init containers that fetch and check the model; empty where none is needed */ -}}
{{- define "whippet.initContainers" -}}
{{- if eq .Values.model.source "initContainer" }}
- name: fetch-model
  image: {{ .Values.model.initContainer.image }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  {{- with .Values.model.initContainer.command }}
  command:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.model.initContainer.env }}
  env:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- toYaml .Values.containerSecurityContext | nindent 4 }}
  resources:
    {{- toYaml .Values.resources | nindent 4 }}
  volumeMounts:
    - name: model
      mountPath: /model
    - name: tmp
      mountPath: /tmp
{{- end }}
{{- if .Values.model.manifest }}
- name: check-model
  image: {{ include "whippet.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [sha256sum, --check, --strict, --quiet, /etc/whippet/manifest/SHA256SUMS]
  workingDir: {{ include "whippet.modelFolder" . }}
  securityContext:
    {{- toYaml .Values.containerSecurityContext | nindent 4 }}
  resources:
    {{- toYaml .Values.resources | nindent 4 }}
  volumeMounts:
    {{- if ne .Values.model.source "demo" }}
    - name: model
      mountPath: /model
      readOnly: true
    {{- end }}
    - name: manifest
      mountPath: /etc/whippet/manifest
      readOnly: true
{{- end }}
{{- end -}}

{{- /* Resources of the container, GPUs among them */ -}}
{{- define "whippet.resources" -}}
{{- $resources := deepCopy .Values.resources }}
{{- if gt (.Values.gpu.count | int) 0 }}
{{- $_ := set $resources "limits" (merge (dict .Values.gpu.resourceName (.Values.gpu.count | int)) ($resources.limits | default dict)) }}
{{- end }}
{{- toYaml $resources }}
{{- end -}}

{{- /* Mounts of the model and of the folders that are written to, and their volumes */ -}}
{{- define "whippet.modelMounts" -}}
- name: cache
  mountPath: /var/cache/whippet
- name: tmp
  mountPath: /tmp
{{- if ne .Values.model.source "demo" }}
- name: model
  mountPath: /model
  readOnly: true
{{- end }}
{{- end -}}

{{- define "whippet.modelVolumes" -}}
- name: cache
  emptyDir:
    sizeLimit: {{ .Values.cacheDir.sizeLimit }}
- name: tmp
  emptyDir:
    sizeLimit: 256Mi
{{- if eq .Values.model.source "pvc" }}
- name: model
  persistentVolumeClaim:
    claimName: {{ .Values.model.pvc.existingClaim | default (printf "%s-model" (include "whippet.fullname" .)) }}
    readOnly: true
{{- else if eq .Values.model.source "initContainer" }}
- name: model
  emptyDir:
    sizeLimit: {{ .Values.model.initContainer.sizeLimit }}
{{- else if eq .Values.model.source "image" }}
- name: model
  image:
    reference: {{ .Values.model.image.reference }}
    pullPolicy: {{ .Values.model.image.pullPolicy }}
{{- end }}
{{- if .Values.model.manifest }}
- name: manifest
  configMap:
    name: {{ include "whippet.fullname" . }}-manifest
{{- end }}
{{- end -}}

{{- /* The pod of a server: a template's metadata and spec */ -}}
{{- define "whippet.pod" -}}
metadata:
  {{- include "whippet.podMetadata" . | nindent 2 }}
spec:
  {{- include "whippet.podSettings" . | nindent 2 }}
  terminationGracePeriodSeconds: {{ include "whippet.grace" . }}
  {{- with include "whippet.initContainers" . | trim }}
  initContainers:
    {{- . | nindent 4 }}
  {{- end }}
  containers:
    - name: whippet
      image: {{ include "whippet.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args: [serve, --config, /etc/whippet/config]
      {{- with .Values.extraEnvVars }}
      env:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        - {name: grpc, containerPort: 50051, protocol: TCP}
        - {name: admin, containerPort: 50052, protocol: TCP}
        - {name: health, containerPort: 50053, protocol: TCP}
        - {name: metrics, containerPort: 9090, protocol: TCP}
        {{- if include "whippet.grouped" . }}
        - {name: ranks, containerPort: 50061, protocol: TCP}
        {{- end }}
      # On the plaintext health port, so that TLS on the others does not matter. `""` is the process; the other one is
      # loaded, stepping and not draining.
      startupProbe:
        grpc: {port: 50053, service: whippet.v1.GenerationService}
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: {{ ceil (divf (include "whippet.startup" .) 2) }}
      readinessProbe:
        grpc: {port: 50053, service: whippet.v1.GenerationService}
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: 1
      livenessProbe:
        grpc: {port: 50053, service: ""}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 6
      securityContext:
        {{- toYaml .Values.containerSecurityContext | nindent 8 }}
      resources:
        {{- include "whippet.resources" . | nindent 8 }}
      volumeMounts:
        - name: config
          mountPath: /etc/whippet/config
          readOnly: true
        {{- include "whippet.modelMounts" . | nindent 8 }}
        {{- if .Values.tls.existingSecret }}
        - name: tls
          mountPath: /etc/whippet/tls
          readOnly: true
        {{- end }}
        {{- if .Values.auth.tokens.existingSecret }}
        - name: tokens
          mountPath: /etc/whippet/tokens
          readOnly: true
        {{- end }}
        {{- if .Values.auth.tenants.existingSecret }}
        - name: tenants
          mountPath: /etc/whippet/tenants
          readOnly: true
        {{- end }}
        {{- if include "whippet.redisSecret" . }}
        - name: redis
          mountPath: /etc/whippet/redis
          readOnly: true
        {{- end }}
        {{- if .Values.redis.keySecret }}
        - name: cache-keys
          mountPath: /etc/whippet/cache-keys
          readOnly: true
        {{- end }}
        {{- if include "whippet.grouped" . }}
        {{- include "whippet.ranksMount" . | nindent 8 }}
        {{- end }}
  volumes:
    # Two ConfigMaps in one folder, without subPath, so that changes of the second reach a running server.
    - name: config
      projected:
        sources:
          - configMap:
              name: {{ include "whippet.fullname" . }}-config
              items: [{key: config.yaml, path: 10-config.yaml}]
          - configMap:
              name: {{ include "whippet.fullname" . }}-switches
              items: [{key: switches.yaml, path: 20-switches.yaml}]
    {{- include "whippet.modelVolumes" . | nindent 4 }}
    {{- with .Values.tls.existingSecret }}
    - name: tls
      secret: {secretName: {{ . }}, defaultMode: 0440}
    {{- end }}
    {{- with .Values.auth.tokens.existingSecret }}
    - name: tokens
      secret: {secretName: {{ . }}, defaultMode: 0440}
    {{- end }}
    {{- with .Values.auth.tenants.existingSecret }}
    - name: tenants
      secret: {secretName: {{ . }}, defaultMode: 0440}
    {{- end }}
    {{- with include "whippet.redisSecret" . }}
    - name: redis
      secret: {secretName: {{ . }}, defaultMode: 0440}
    {{- end }}
    {{- with .Values.redis.keySecret }}
    - name: cache-keys
      secret: {secretName: {{ . }}, defaultMode: 0440}
    {{- end }}
    {{- if include "whippet.grouped" . }}
    {{- include "whippet.ranksVolume" . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- /* Mount and volume of the secret that the pods of a group share */ -}}
{{- define "whippet.ranksMount" -}}
- name: ranks
  mountPath: /etc/whippet/ranks
  readOnly: true
{{- end -}}

{{- define "whippet.ranksVolume" -}}
- name: ranks
  secret: {secretName: {{ .Values.leaderWorkerSet.secretName }}, defaultMode: 0440, items: [{key: secret, path: secret}]}
{{- end -}}

{{- /* The pod of a group that computes what its leader asks for. It serves no port, so nothing probes it: the leader
       notices where it is silent. Settings come from the leader, and callers' secrets stay there. */ -}}
{{- define "whippet.workerPod" -}}
metadata:
  {{- include "whippet.podMetadata" . | nindent 2 }}
spec:
  {{- include "whippet.podSettings" . | nindent 2 }}
  # A worker pod has no calls to finish. It outlives a leader pod that drains, which owns it.
  terminationGracePeriodSeconds: 10
  {{- with include "whippet.initContainers" . | trim }}
  initContainers:
    {{- . | nindent 4 }}
  {{- end }}
  containers:
    - name: whippet
      image: {{ include "whippet.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args:
        - rank
        - --leader
        - $(LWS_LEADER_ADDRESS):50061
        - --secret-file
        - /etc/whippet/ranks/secret
        - --ranks
        - {{ include "whippet.ranksOfPod" . | quote }}
      {{- with .Values.extraEnvVars }}
      env:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      securityContext:
        {{- toYaml .Values.containerSecurityContext | nindent 8 }}
      resources:
        {{- include "whippet.resources" . | nindent 8 }}
      volumeMounts:
        {{- include "whippet.modelMounts" . | nindent 8 }}
        {{- include "whippet.ranksMount" . | nindent 8 }}
  volumes:
    {{- include "whippet.modelVolumes" . | nindent 4 }}
    {{- include "whippet.ranksVolume" . | nindent 4 }}
{{- end -}}
