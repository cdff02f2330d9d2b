{{/* Names, labels and choices that several templates share. */}}

{{- define "adit.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 45 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 45 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 45 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "adit.server.name" -}}
{{ include "adit.fullname" . }}-server
{{- end -}}

{{- define "adit.agent.name" -}}
{{ include "adit.fullname" . }}-agent
{{- end -}}

{{/* The Service by which agents reach servers. */}}
{{- define "adit.expose.name" -}}
{{ include "adit.server.name" . }}-agents
{{- end -}}

{{- define "adit.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* Labels that select the pods. Policies of others know the first one. */}}
{{- define "adit.server.selector" -}}
k8s-app: konnectivity-server
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "adit.agent.selector" -}}
k8s-app: konnectivity-agent
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* The selector is part of them, without what both have. */}}
{{- define "adit.server.labels" -}}
k8s-app: konnectivity-server
{{ include "adit.labels" . }}
app.kubernetes.io/component: server
{{- end -}}

{{- define "adit.agent.labels" -}}
k8s-app: konnectivity-agent
{{ include "adit.labels" . }}
app.kubernetes.io/component: agent
{{- end -}}

{{- define "adit.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* What agents prove: each is "true" or empty. */}}
{{- define "adit.mtls" -}}
{{- if ne .Values.auth.mode "token" -}}true{{- end -}}
{{- end -}}

{{- define "adit.token" -}}
{{- if ne .Values.auth.mode "mtls" -}}true{{- end -}}
{{- end -}}

{{- define "adit.server.serviceAccount" -}}
{{ .Values.server.serviceAccount.name | default (include "adit.server.name" .) }}
{{- end -}}

{{- define "adit.agent.serviceAccount" -}}
{{- if .Values.agent.serviceAccount.name -}}
{{ .Values.agent.serviceAccount.name }}
{{- else if include "adit.token" . -}}
{{ .Values.auth.token.serviceAccount }}
{{- else -}}
{{ include "adit.agent.name" . }}
{{- end -}}
{{- end -}}

{{/* "true" where the server asks the Kubernetes API. */}}
{{- define "adit.server.asksApi" -}}
{{- if and (not .Values.server.noAgents) (or (include "adit.token" .) .Values.leases.enabled) -}}true{{- end -}}
{{- end -}}

{{/* "true" where it does so by the account of its pod. */}}
{{- define "adit.server.inCluster" -}}
{{- $kubeconfig := .Values.server.kubeconfig -}}
{{- if and (include "adit.server.asksApi" .) (not $kubeconfig.secretName) (not $kubeconfig.hostPath) -}}true{{- end -}}
{{- end -}}

{{/* Secret of the port for agents; that of a Certificate if none is named. */}}
{{- define "adit.server.agentsSecret" -}}
{{- $tls := .Values.server.tls.agents -}}
{{- if $tls.secretName -}}
{{ $tls.secretName }}
{{- else if and .Values.certManager.enabled (not $tls.hostPath) -}}
{{ include "adit.server.name" . }}-agents
{{- end -}}
{{- end -}}

{{- define "adit.server.clientsSecret" -}}
{{- $tls := .Values.server.tls.clients -}}
{{- if $tls.secretName -}}
{{ $tls.secretName }}
{{- else if and .Values.certManager.enabled (not $tls.hostPath) -}}
{{ include "adit.server.name" . }}-clients
{{- end -}}
{{- end -}}

{{- define "adit.server.peersSecret" -}}
{{- $tls := .Values.server.tls.peers -}}
{{- if $tls.secretName -}}
{{ $tls.secretName }}
{{- else if and .Values.certManager.enabled (not $tls.hostPath) -}}
{{ include "adit.peers.name" . }}
{{- end -}}
{{- end -}}

{{/* The Service that names servers among each other, ready or not. */}}
{{- define "adit.peers.name" -}}
{{ include "adit.server.name" . }}-peers
{{- end -}}

{{/* "true" where other servers ask this one. */}}
{{- define "adit.server.hasPeerPort" -}}
{{- if and .Values.server.peers.enabled (not .Values.server.noAgents) -}}true{{- end -}}
{{- end -}}

{{/* Addresses of peers, a list in JSON. */}}
{{- define "adit.peers" -}}
{{- $peers := .Values.server.peers -}}
{{- $own := printf "dns:%s.%s.svc:%d" (include "adit.peers.name" .) .Release.Namespace (int .Values.server.ports.peers) -}}
{{- ternary $peers.addresses (list $own) (or .Values.server.noAgents (gt (len $peers.addresses) 0)) | toJson -}}
{{- end -}}

{{/* Names of the ports with TLS, as in `server.tls`, a list in JSON. */}}
{{- define "adit.server.tlsPorts" -}}
{{- $ports := list -}}
{{- if not .Values.server.noAgents -}}{{- $ports = append $ports "agents" -}}{{- end -}}
{{- if .Values.server.peers.enabled -}}{{- $ports = append $ports "peers" -}}{{- end -}}
{{- if eq .Values.server.frontend.transport "tcp" -}}{{- $ports = append $ports "clients" -}}{{- end -}}
{{- $ports | toJson -}}
{{- end -}}

{{/* Empty is ClusterFirst. The node's resolver knows no Services. */}}
{{- define "adit.server.dnsPolicy" -}}
{{- if ne .Values.server.dnsPolicy "auto" -}}
{{ .Values.server.dnsPolicy }}
{{- else if include "adit.server.hostNetwork" . -}}
{{- $isService := and .Values.server.peers.enabled (regexMatch "\\.svc[.:]" (include "adit.peers" .)) -}}
{{ ternary "ClusterFirstWithHostNet" "Default" $isService }}
{{- end -}}
{{- end -}}

{{- define "adit.agent.secret" -}}
{{- if .Values.agent.tlsSecretName -}}
{{ .Values.agent.tlsSecretName }}
{{- else if and .Values.certManager.enabled (include "adit.mtls" .) -}}
{{ include "adit.agent.name" . }}
{{- end -}}
{{- end -}}

{{/* Secret with the CA of servers. With tokens and cert-manager only the server of this release has one. */}}
{{- define "adit.agent.caSecret" -}}
{{- if .Values.agent.ca.secretName -}}
{{ .Values.agent.ca.secretName }}
{{- else if not .Values.agent.ca.configMapName -}}
{{- if include "adit.agent.secret" . -}}
{{ include "adit.agent.secret" . }}
{{- else if and .Values.server.enabled (not .Values.server.noAgents) .Values.certManager.enabled -}}
{{ include "adit.server.agentsSecret" . }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Empty where neither values nor replicas say it. */}}
{{- define "adit.serverCount" -}}
{{- if .Values.serverCount -}}
{{ int .Values.serverCount }}
{{- else if and (eq .Values.server.kind "Deployment") (not (kindIs "invalid" .Values.server.replicas)) -}}
{{ int .Values.server.replicas }}
{{- end -}}
{{- end -}}

{{/* Servers that agents call, separated by commas. */}}
{{- define "adit.agent.servers" -}}
{{- if .Values.agent.servers -}}
{{ join "," .Values.agent.servers }}
{{- else if and .Values.server.enabled (not .Values.server.noAgents) (ne .Values.expose.type "hostNetwork") -}}
{{ include "adit.expose.name" . }}.{{ .Release.Namespace }}.svc:{{ int .Values.expose.port }}
{{- end -}}
{{- end -}}

{{/* "true" on the network of the node. A sidecar is where its pod is. */}}
{{- define "adit.server.hostNetwork" -}}
{{- if and (eq .Values.expose.type "hostNetwork") (ne (.Values.snippet | default "") "sidecar") -}}true{{- end -}}
{{- end -}}

{{/* Seconds before SIGTERM; empty is none. Only endpoints of a Service change with a lag. */}}
{{- define "adit.server.preStop" -}}
{{- $isBehind := or (eq .Values.server.frontend.transport "tcp") (ne .Values.expose.type "hostNetwork") (eq (.Values.snippet | default "") "sidecar") -}}
{{- if and $isBehind .Values.server.preStopSeconds -}}
{{ int .Values.server.preStopSeconds }}
{{- end -}}
{{- end -}}

{{- define "adit.server.gracePeriod" -}}
{{ add (int (include "adit.server.preStop" . | default "0")) (int .Values.server.shutdownGraceSeconds) 5 }}
{{- end -}}

{{- define "adit.monitored" -}}
{{- if or .Values.metrics.podMonitor.enabled .Values.metrics.serviceMonitor.enabled -}}true{{- end -}}
{{- end -}}

{{/* Address of probes and metrics; empty is all. */}}
{{- define "adit.server.healthAddress" -}}
{{- if ne .Values.server.healthAddress "auto" -}}
{{ .Values.server.healthAddress }}
{{- else if and (include "adit.server.hostNetwork" .) (not (include "adit.monitored" .)) -}}
127.0.0.1
{{- end -}}
{{- end -}}

{{- define "adit.agent.healthAddress" -}}
{{- if ne .Values.agent.healthAddress "auto" -}}
{{ .Values.agent.healthAddress }}
{{- else if and .Values.agent.hostNetwork (not (include "adit.monitored" .)) -}}
127.0.0.1
{{- end -}}
{{- end -}}

{{/* "true" where eBPF is loaded: as user 0, since Kubernetes has no ambient capabilities. */}}
{{- define "adit.server.ebpf" -}}
{{- if or .Values.server.redirect.enabled .Values.server.account.enabled -}}true{{- end -}}
{{- end -}}

{{- define "adit.agent.ebpf" -}}
{{- if or .Values.agent.redirect.enabled .Values.agent.account.enabled -}}true{{- end -}}
{{- end -}}

{{/* "true" where the server writes or reads folders of the node, which root owns. */}}
{{- define "adit.server.usesNode" -}}
{{- $server := .Values.server -}}
{{- $isSocket := and (eq $server.frontend.transport "unix") (ne (.Values.snippet | default "") "sidecar") -}}
{{- if or $isSocket $server.tls.agents.hostPath $server.tls.clients.hostPath $server.tls.peers.hostPath $server.kubeconfig.hostPath -}}true{{- end -}}
{{- end -}}

{{- define "adit.server.user" -}}
{{- if not (kindIs "invalid" .Values.server.runAsUser) -}}
{{ int .Values.server.runAsUser }}
{{- else if or (include "adit.server.usesNode" .) (include "adit.server.ebpf" .) -}}
0
{{- else -}}
65532
{{- end -}}
{{- end -}}

{{- define "adit.agent.user" -}}
{{- if not (kindIs "invalid" .Values.agent.runAsUser) -}}
{{ int .Values.agent.runAsUser }}
{{- else if include "adit.agent.ebpf" . -}}
0
{{- else -}}
65532
{{- end -}}
{{- end -}}

{{/* Context of a pod: a dict of user and values (runAsGroup, seccompProfile, seLinuxOptions). */}}
{{- define "adit.podSecurity" -}}
{{- $user := int .user -}}
{{- $group := ternary $user (int (default 0 .values.runAsGroup)) (kindIs "invalid" .values.runAsGroup) -}}
runAsNonRoot: {{ ne $user 0 }}
runAsUser: {{ $user }}
runAsGroup: {{ $group }}
{{- if ne $user 0 }}
fsGroup: {{ $group }}
{{- end }}
seccompProfile:
  {{- toYaml .values.seccompProfile | nindent 2 }}
{{- with .values.seLinuxOptions }}
seLinuxOptions:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Context of a container: a dict of capabilities, a list. */}}
{{- define "adit.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- with .capabilities }}
  add: [{{ join ", " . }}]
  {{- end }}
{{- end -}}

{{/* Capabilities: a dict of ebpf ("true" or empty), netns (a list) and perfmon. */}}
{{- define "adit.capabilities" -}}
{{- $all := list -}}
{{- if .ebpf -}}{{- $all = concat $all (list "BPF" "NET_ADMIN") -}}{{- end -}}
{{- if and .ebpf .perfmon -}}{{- $all = append $all "PERFMON" -}}{{- end -}}
{{- if .netns -}}{{- $all = concat $all (list "SYS_ADMIN" "SYS_PTRACE") -}}{{- end -}}
{{- join "," $all -}}
{{- end -}}

{{- define "adit.priorityClass" -}}
{{- if ne .given "auto" -}}
{{ .given }}
{{- else if eq .kind "DaemonSet" -}}
system-node-critical
{{- else -}}
system-cluster-critical
{{- end -}}
{{- end -}}

{{/* Topology constraints of a Deployment: a dict of given (a list), kind and selector. */}}
{{- define "adit.spread" -}}
{{- if .given -}}
topologySpreadConstraints:
  {{- toYaml .given | nindent 2 }}
{{- else if eq .kind "Deployment" -}}
topologySpreadConstraints:
  {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- $.selector | nindent 8 }}
  {{- end }}
{{- end -}}
{{- end -}}

{{/* One line of --v for a level. */}}
{{- define "adit.verbosity" -}}
{{- get (dict "error" "0" "warn" "0" "info" "2" "debug" "5" "trace" "6") . -}}
{{- end -}}
