{{/*
The pod of a server. Snippets of deploy/manifests use these parts too: there `.Values.snippet` is `sidecar` or `staticPod`, which is no
value of the chart.
*/}}

{{/* The command line. */}}
{{- define "adit.server.args" -}}
{{- $server := .Values.server -}}
{{- $frontend := $server.frontend -}}
{{- $compat := .Values.compat -}}
- server
{{- if $compat }}
- --compat
- --mode={{ $frontend.protocol }}
{{- end }}
{{- if eq $frontend.transport "unix" }}
{{- $socket := printf "/run/konnectivity/%s" $frontend.unix.name }}
{{- if $compat }}
- {{ printf "--uds-name=%s" $socket | quote }}
- --server-port=0
{{- else }}
- {{ printf "--frontend=%s=unix:%s" $frontend.protocol $socket | quote }}
{{- end }}
{{- else }}
{{- if $compat }}
- --server-port={{ int $frontend.tcp.port }}
{{- with $frontend.tcp.bindAddress }}
- {{ printf "--server-bind-address=%s" . | quote }}
{{- end }}
{{- else }}
{{- $address := $frontend.tcp.bindAddress }}
{{- if contains ":" $address }}
{{- $address = printf "[%s]" $address }}
{{- end }}
- {{ printf "--frontend=%s=tcp:%s:%d" $frontend.protocol $address (int $frontend.tcp.port) | quote }}
{{- end }}
- --server-cert=/etc/adit/clients/{{ $server.tls.clients.cert }}
- --server-key=/etc/adit/clients/{{ $server.tls.clients.key }}
- --server-ca-cert=/etc/adit/clients{{ if $server.tls.clients.caSecretName }}-ca{{ end }}/{{ $server.tls.clients.ca }}
{{- end }}
{{- if $server.noAgents }}
- --no-agents
{{- else }}
- --agent-port={{ int $server.ports.agents }}
- --cluster-cert=/etc/adit/agents/{{ $server.tls.agents.cert }}
- --cluster-key=/etc/adit/agents/{{ $server.tls.agents.key }}
{{- if include "adit.mtls" . }}
- --cluster-ca-cert=/etc/adit/agents{{ if $server.tls.agents.caSecretName }}-ca{{ end }}/{{ $server.tls.agents.ca }}
{{- end }}
{{- if include "adit.token" . }}
- --agent-namespace={{ .Values.auth.token.namespace }}
- --agent-service-account={{ .Values.auth.token.serviceAccount }}
- {{ printf "--authentication-audience=%s" .Values.auth.token.audience | quote }}
{{- end }}
{{- if eq .Values.auth.mode "both" }}
- --agent-proof=both
{{- end }}
{{- if include "adit.server.asksApi" . }}
{{- if or $server.kubeconfig.secretName $server.kubeconfig.hostPath }}
- --kubeconfig=/etc/adit/kubeconfig/kubeconfig
{{- end }}
{{- end }}
{{- if .Values.leases.enabled }}
- --enable-lease-controller
- --lease-namespace={{ .Values.leases.namespace }}
- {{ printf "--lease-label=%s" .Values.leases.label | quote }}
{{- else }}
- --server-count={{ include "adit.serverCount" . }}
{{- end }}
{{- range $server.agentGrants }}
- {{ printf "--agent-grant=%s" . | quote }}
{{- end }}
{{- end }}
{{- if $server.peers.enabled }}
{{- if not $server.noAgents }}
- --peer-bind=:{{ int $server.ports.peers }}
- --peer-agent-links={{ int $server.peers.agentLinks }}
{{- end }}
{{- range include "adit.peers" . | fromJsonArray }}
- {{ printf "--peer=%s" . | quote }}
{{- end }}
{{- range $server.peers.networks }}
- {{ printf "--peer-network=%s" . | quote }}
{{- end }}
- {{ printf "--peer-group=%s" $server.peers.group | quote }}
- --peer-cert=/etc/adit/peers/{{ $server.tls.peers.cert }}
- --peer-key=/etc/adit/peers/{{ $server.tls.peers.key }}
- --peer-ca-cert=/etc/adit/peers{{ if $server.tls.peers.caSecretName }}-ca{{ end }}/{{ $server.tls.peers.ca }}
{{- end }}
- --proxy-strategies={{ $server.proxyStrategies }}
{{- range $server.clientAllowTargets }}
- {{ printf "--client-allow-target=%s" . | quote }}
{{- end }}
{{- range $server.allowedDestinations }}
- {{ printf "--allowed-destination=%s" . | quote }}
{{- end }}
{{- with $server.zone }}
- --zone={{ . }}
{{- end }}
{{- with include "adit.server.healthAddress" . }}
- {{ printf "--health-bind-address=%s" . | quote }}
{{- end }}
- --health-port={{ int $server.ports.health }}
{{- if $server.ports.admin }}
- --admin-port={{ int $server.ports.admin }}
{{- else if not $compat }}
- --admin-port=off
{{- end }}
{{- if $server.redirect.enabled }}
{{- range $server.redirect.targets }}
- {{ printf "--redirect=%s" . | quote }}
{{- end }}
{{- range $server.redirect.exclude }}
- {{ printf "--redirect-exclude=%s" . | quote }}
{{- end }}
- {{ printf "--redirect-cgroup=%s" (printf "/host/cgroup/%s" $server.redirect.cgroup | clean) | quote }}
- --redirect-on-failure={{ $server.redirect.onFailure }}
- --redirect-agents={{ $server.redirect.agents }}
{{- range $server.redirect.netns }}
- {{ printf "--redirect-netns=%s" . | quote }}
{{- end }}
{{- end }}
{{- if $server.account.enabled }}
- --account=on
{{- end }}
{{- if $compat }}
- --graceful-shutdown-timeout={{ int $server.shutdownGraceSeconds }}s
- --v={{ include "adit.verbosity" $server.logLevel }}
{{- else }}
- --shutdown-grace={{ int $server.shutdownGraceSeconds }}s
- --log-format={{ $server.logFormat }}
- --log-level={{ $server.logLevel }}
{{- end }}
{{- range $server.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "adit.server.container" -}}
{{- $server := .Values.server -}}
{{- $address := include "adit.server.healthAddress" . -}}
- name: konnectivity-server
  image: {{ include "adit.image" . | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [/adit]
  args:
    {{- include "adit.server.args" . | nindent 4 }}
  env:
    - name: PROXY_SERVER_ID
      valueFrom:
        fieldRef:
          fieldPath: metadata.name
    {{- with $server.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    {{- if not $server.noAgents }}
    - name: agents
      containerPort: {{ int $server.ports.agents }}
    {{- end }}
    {{- if include "adit.server.hasPeerPort" . }}
    - name: peers
      containerPort: {{ int $server.ports.peers }}
    {{- end }}
    {{- if eq $server.frontend.transport "tcp" }}
    - name: clients
      containerPort: {{ int $server.frontend.tcp.port }}
    {{- end }}
    - name: server-health
      containerPort: {{ int $server.ports.health }}
  {{- with include "adit.server.preStop" . }}
  lifecycle:
    preStop:
      sleep:
        seconds: {{ . }}
  {{- end }}
  livenessProbe:
    {{- include "adit.probe" (dict "path" "/healthz" "port" "server-health" "address" $address) | nindent 4 }}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  readinessProbe:
    {{- include "adit.probe" (dict "path" "/healthz" "port" "server-health" "address" $address) | nindent 4 }}
    periodSeconds: 5
    timeoutSeconds: 2
  resources:
    {{- toYaml $server.resources | nindent 4 }}
  securityContext:
    {{- $needs := dict "ebpf" (include "adit.server.ebpf" .) "netns" (and $server.redirect.enabled $server.redirect.netns) "perfmon" .Values.ebpf.perfmon }}
    {{- $capabilities := include "adit.capabilities" $needs }}
    {{- if eq (.Values.snippet | default "") "sidecar" }}
    {{- omit (include "adit.podSecurity" (dict "user" (include "adit.server.user" .) "values" $server) | fromYaml) "fsGroup" | toYaml | nindent 4 }}
    {{- end }}
    {{- include "adit.containerSecurity" (dict "capabilities" (splitList "," $capabilities | compact)) | nindent 4 }}
  volumeMounts:
    {{- include "adit.server.mounts" . | trim | nindent 4 }}
{{- end -}}

{{/* A probe: a dict of path, port and address. */}}
{{- define "adit.probe" -}}
httpGet:
  path: {{ .path }}
  port: {{ .port }}
  {{- with .address }}
  host: {{ . | quote }}
  {{- end }}
{{- end -}}

{{- define "adit.server.mounts" -}}
{{- $server := .Values.server -}}
{{- range $name := include "adit.server.tlsPorts" . | fromJsonArray }}
- name: {{ $name }}-tls
  mountPath: /etc/adit/{{ $name }}
  readOnly: true
{{- if and (get $server.tls $name).caSecretName (or (ne $name "agents") (include "adit.mtls" $)) }}
- name: {{ $name }}-ca
  mountPath: /etc/adit/{{ $name }}-ca
  readOnly: true
{{- end }}
{{- end }}
{{- if eq $server.frontend.transport "unix" }}
- name: konnectivity-uds
  mountPath: /run/konnectivity
{{- end }}
{{- if include "adit.server.asksApi" . }}
{{- if $server.kubeconfig.hostPath }}
- name: kubeconfig
  mountPath: /etc/adit/kubeconfig/kubeconfig
  readOnly: true
{{- else if $server.kubeconfig.secretName }}
- name: kubeconfig
  mountPath: /etc/adit/kubeconfig
  readOnly: true
{{- end }}
{{- end }}
{{- if not .Values.compat }}
- name: adit-run
  mountPath: /run/adit
{{- end }}
{{- if $server.redirect.enabled }}
{{- include "adit.redirect.mounts" (dict "bpffs" (eq $server.redirect.onFailure "closed") "netns" $server.redirect.netns) | nindent 0 }}
{{- end }}
{{- with $server.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The node's cgroups, and what else a redirect uses: a dict of bpffs and netns. The cgroups of the container would be its own. */}}
{{- define "adit.redirect.mounts" -}}
- name: cgroup
  mountPath: /host/cgroup
  readOnly: true
{{- if .bpffs }}
- name: bpffs
  mountPath: /sys/fs/bpf
{{- end }}
{{- if .netns }}
- name: netns
  mountPath: /run/netns
  mountPropagation: HostToContainer
  readOnly: true
{{- end }}
{{- end -}}

{{- define "adit.redirect.volumes" -}}
- name: cgroup
  hostPath:
    path: /sys/fs/cgroup
    type: Directory
{{- if .bpffs }}
- name: bpffs
  hostPath:
    path: /sys/fs/bpf
    type: Directory
{{- end }}
{{- if .netns }}
- name: netns
  hostPath:
    path: /run/netns
    type: DirectoryOrCreate
{{- end }}
{{- end -}}

{{/* Files of one TLS port: a dict of name, tls, secret and mtls. */}}
{{- define "adit.server.tlsVolumes" -}}
- name: {{ .name }}-tls
  {{- if .tls.hostPath }}
  hostPath:
    path: {{ .tls.hostPath }}
    type: Directory
  {{- else }}
  secret:
    secretName: {{ .secret }}
    defaultMode: 0440
  {{- end }}
{{- if and .tls.caSecretName .mtls }}
- name: {{ .name }}-ca
  secret:
    secretName: {{ .tls.caSecretName }}
    defaultMode: 0440
{{- end }}
{{- end -}}

{{- define "adit.server.volumes" -}}
{{- $server := .Values.server -}}
{{- range $name := include "adit.server.tlsPorts" . | fromJsonArray }}
{{- $secret := include (printf "adit.server.%sSecret" $name) $ }}
{{- $mtls := ternary (include "adit.mtls" $) "true" (eq $name "agents") }}
{{ include "adit.server.tlsVolumes" (dict "name" $name "tls" (get $server.tls $name) "secret" $secret "mtls" $mtls) }}
{{- end }}
{{- if eq $server.frontend.transport "tcp" }}
{{- else if eq (.Values.snippet | default "") "sidecar" }}
- name: konnectivity-uds
  emptyDir: {}
{{- else }}
- name: konnectivity-uds
  hostPath:
    path: {{ $server.frontend.unix.folder }}
    type: DirectoryOrCreate
{{- end }}
{{- if include "adit.server.asksApi" . }}
{{- if $server.kubeconfig.hostPath }}
- name: kubeconfig
  hostPath:
    path: {{ $server.kubeconfig.hostPath }}
    type: File
{{- else if $server.kubeconfig.secretName }}
- name: kubeconfig
  secret:
    secretName: {{ $server.kubeconfig.secretName }}
    defaultMode: 0440
    items:
      - key: {{ $server.kubeconfig.key }}
        path: kubeconfig
{{- end }}
{{- end }}
{{- if not .Values.compat }}
- name: adit-run
  emptyDir: {}
{{- end }}
{{- if $server.redirect.enabled }}
{{- include "adit.redirect.volumes" (dict "bpffs" (eq $server.redirect.onFailure "closed") "netns" $server.redirect.netns) | nindent 0 }}
{{- end }}
{{- with $server.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* What a pod has beside its containers; a static pod has it too. */}}
{{- define "adit.server.pod" -}}
{{- $server := .Values.server -}}
{{- $isStatic := eq (.Values.snippet | default "") "staticPod" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- if not $isStatic }}
serviceAccountName: {{ include "adit.server.serviceAccount" . }}
{{- end }}
automountServiceAccountToken: {{ eq (include "adit.server.inCluster" .) "true" }}
enableServiceLinks: false
priorityClassName: {{ include "adit.priorityClass" (dict "given" $server.priorityClassName "kind" $server.kind) }}
terminationGracePeriodSeconds: {{ include "adit.server.gracePeriod" . }}
{{- if include "adit.server.hostNetwork" . }}
hostNetwork: true
{{- end }}
{{- with include "adit.server.dnsPolicy" . }}
dnsPolicy: {{ . }}
{{- end }}
{{- /* An exempt agent is forgotten when it ends, and namespaces are found, only where the node's processes are seen. */}}
{{- if and $server.redirect.enabled (or (eq $server.redirect.agents "exempt") (eq $server.redirect.onFailure "closed") $server.redirect.netns) }}
hostPID: true
{{- end }}
securityContext:
  {{- include "adit.podSecurity" (dict "user" (include "adit.server.user" .) "values" $server) | nindent 2 }}
containers:
  {{- include "adit.server.container" . | nindent 2 }}
volumes:
  {{- include "adit.server.volumes" . | trim | nindent 2 }}
{{- end -}}
