{{/* The pod of an agent. */}}

{{/* The command line. */}}
{{- define "adit.agent.args" -}}
{{- $agent := .Values.agent -}}
{{- $compat := .Values.compat -}}
- agent
{{- if $compat }}
- --compat
{{- end }}
- {{ printf "--proxy-server-host=%s" (include "adit.agent.servers" .) | quote }}
- --proxy-server-port={{ int $agent.serverPort }}
- --ca-cert=/etc/adit/ca/{{ $agent.ca.key }}
{{- if include "adit.mtls" . }}
- --agent-cert=/etc/adit/tls/tls.crt
- --agent-key=/etc/adit/tls/tls.key
{{- end }}
{{- if include "adit.token" . }}
- --service-account-token-path=/var/run/secrets/adit/token
{{- end }}
{{- with include "adit.agent.identifiers" . }}
- {{ printf "--agent-identifiers=%s" . | quote }}
{{- end }}
{{- range $agent.allowTargets }}
- {{ printf "--allow-target=%s" . | quote }}
{{- end }}
{{- if .Values.leases.enabled }}
- --count-server-leases
- --lease-namespace={{ .Values.leases.namespace }}
- {{ printf "--lease-label-selector=%s" .Values.leases.label | quote }}
- --server-count-source={{ .Values.leases.countSource }}
{{- end }}
{{- if $agent.syncForever }}
- --sync-forever
{{- end }}
{{- with include "adit.agent.healthAddress" . }}
- {{ printf "--health-server-host=%s" . | quote }}
{{- end }}
- --health-server-port={{ int $agent.ports.health }}
{{- if $agent.ports.admin }}
- --admin-server-port={{ int $agent.ports.admin }}
{{- else if not $compat }}
- --admin-server-port=off
{{- end }}
{{- if $agent.redirect.enabled }}
{{- range $agent.redirect.services }}
- {{ printf "--redirect-apiserver=%s" . | quote }}
{{- end }}
- {{ printf "--redirect-cgroup=%s" (printf "/host/cgroup/%s" $agent.redirect.cgroup | clean) | quote }}
{{- range $agent.redirect.netns }}
- {{ printf "--redirect-netns=%s" . | quote }}
{{- end }}
{{- if $agent.redirect.nodeAddress }}
- --redirect-node-address=$(HOST_IP)
{{- end }}
{{- end }}
{{- with $agent.nodeInterface.address }}
- {{ printf "--bind-address=%s" . | quote }}
{{- range $agent.nodeInterface.targets }}
- {{ printf "--target=%s" . | quote }}
{{- end }}
{{- range $agent.nodeInterface.from }}
- {{ printf "--target-from=%s" . | quote }}
{{- end }}
{{- end }}
{{- if $agent.account.enabled }}
- --account=on
{{- end }}
{{- if $compat }}
- --v={{ include "adit.verbosity" $agent.logLevel }}
{{- else }}
- --shutdown-grace={{ int $agent.shutdownGraceSeconds }}s
- --log-format={{ $agent.logFormat }}
- --log-level={{ $agent.logLevel }}
{{- end }}
{{- range $agent.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{/* The agent of each node takes the dials to its node. The agents of a Deployment are anywhere. */}}
{{- define "adit.agent.identifiers" -}}
{{- $agent := .Values.agent -}}
{{- if ne $agent.identifiers "auto" -}}
{{ $agent.identifiers }}
{{- else if eq $agent.kind "DaemonSet" -}}
ipv4=$(HOST_IP)
{{- end -}}
{{- end -}}

{{- define "adit.agent.pod" -}}
{{- $agent := .Values.agent -}}
{{- $address := include "adit.agent.healthAddress" . -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
serviceAccountName: {{ include "adit.agent.serviceAccount" . }}
automountServiceAccountToken: {{ .Values.leases.enabled }}
enableServiceLinks: false
priorityClassName: {{ include "adit.priorityClass" (dict "given" $agent.priorityClassName "kind" $agent.kind) }}
terminationGracePeriodSeconds: {{ add (int $agent.shutdownGraceSeconds) 5 }}
{{- if $agent.hostNetwork }}
hostNetwork: true
{{- end }}
{{- if ne $agent.dnsPolicy "auto" }}
dnsPolicy: {{ $agent.dnsPolicy }}
{{- else if $agent.hostNetwork }}
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- if and $agent.redirect.enabled $agent.redirect.netns }}
hostPID: true
{{- end }}
securityContext:
  {{- include "adit.podSecurity" (dict "user" (include "adit.agent.user" .) "values" $agent) | nindent 2 }}
{{- with $agent.nodeInterface.address }}
initContainers:
  {{- /* It only adds: a pod that ends must not take the address from the pod that follows it. */}}
  - name: node-interface
    image: {{ include "adit.image" $ | quote }}
    imagePullPolicy: {{ $.Values.image.pullPolicy }}
    command: [/adit]
    args: [node-interface, add, {{ . | quote }}]
    resources:
      {{- toYaml $agent.resources | nindent 6 }}
    securityContext:
      runAsNonRoot: false
      runAsUser: 0
      {{- /* The profiles of deploy/seccomp allow no sockets of netlink. */}}
      seccompProfile: {type: RuntimeDefault}
      {{- include "adit.containerSecurity" (dict "capabilities" (list "NET_ADMIN")) | nindent 6 }}
{{- end }}
containers:
  - name: konnectivity-agent
    image: {{ include "adit.image" . | quote }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    command: [/adit]
    args:
      {{- include "adit.agent.args" . | nindent 6 }}
    env:
      - name: HOST_IP
        valueFrom:
          fieldRef:
            fieldPath: status.hostIP
      - name: NODE_NAME
        valueFrom:
          fieldRef:
            fieldPath: spec.nodeName
      - name: PROXY_AGENT_ID
        valueFrom:
          fieldRef:
            {{- /* One agent on each node keeps its id, for grants and series. */}}
            fieldPath: {{ ternary "spec.nodeName" "metadata.name" (eq $agent.kind "DaemonSet") }}
      {{- with $agent.extraEnv }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    ports:
      - name: agent-health
        containerPort: {{ int $agent.ports.health }}
    livenessProbe:
      {{- include "adit.probe" (dict "path" "/healthz" "port" "agent-health" "address" $address) | nindent 6 }}
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: 6
    readinessProbe:
      {{- include "adit.probe" (dict "path" "/readyz" "port" "agent-health" "address" $address) | nindent 6 }}
      periodSeconds: 5
      timeoutSeconds: 2
    resources:
      {{- toYaml $agent.resources | nindent 6 }}
    securityContext:
      {{- $needs := dict "ebpf" (include "adit.agent.ebpf" .) "netns" (and $agent.redirect.enabled $agent.redirect.netns) "perfmon" .Values.ebpf.perfmon }}
      {{- $capabilities := include "adit.capabilities" $needs }}
      {{- include "adit.containerSecurity" (dict "capabilities" (splitList "," $capabilities | compact)) | nindent 6 }}
    volumeMounts:
      - name: ca
        mountPath: /etc/adit/ca
        readOnly: true
      {{- if include "adit.mtls" . }}
      - name: tls
        mountPath: /etc/adit/tls
        readOnly: true
      {{- end }}
      {{- if include "adit.token" . }}
      - name: token
        mountPath: /var/run/secrets/adit
        readOnly: true
      {{- end }}
      {{- if not .Values.compat }}
      - name: adit-run
        mountPath: /run/adit
      {{- end }}
      {{- if $agent.redirect.enabled }}
      {{- include "adit.redirect.mounts" (dict "bpffs" false "netns" $agent.redirect.netns) | nindent 6 }}
      {{- end }}
      {{- with $agent.extraVolumeMounts }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
volumes:
  - name: ca
    {{- if $agent.ca.configMapName }}
    configMap:
      name: {{ $agent.ca.configMapName }}
      items:
        - key: {{ $agent.ca.key }}
          path: {{ $agent.ca.key }}
    {{- else }}
    secret:
      secretName: {{ include "adit.agent.caSecret" . }}
      defaultMode: 0440
      items:
        - key: {{ $agent.ca.key }}
          path: {{ $agent.ca.key }}
    {{- end }}
  {{- if include "adit.mtls" . }}
  - name: tls
    secret:
      secretName: {{ include "adit.agent.secret" . }}
      defaultMode: 0440
  {{- end }}
  {{- if include "adit.token" . }}
  - name: token
    projected:
      defaultMode: 0440
      sources:
        - serviceAccountToken:
            audience: {{ .Values.auth.token.audience | quote }}
            expirationSeconds: {{ int .Values.auth.token.expirationSeconds }}
            path: token
  {{- end }}
  {{- if not .Values.compat }}
  - name: adit-run
    emptyDir: {}
  {{- end }}
  {{- if $agent.redirect.enabled }}
  {{- include "adit.redirect.volumes" (dict "bpffs" false "netns" $agent.redirect.netns) | nindent 2 }}
  {{- end }}
  {{- with $agent.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}
