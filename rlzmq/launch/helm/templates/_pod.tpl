{{- define "run" }}rlzmq-{{ .Release.Name }}{{ end }}

{{- define "labels" -}}
app.kubernetes.io/instance: {{ include "run" .root }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- /* Some minutes after the run's end Kubernetes removes the JobSet with what it owns. It owns what is upgraded. */}}
{{- define "metadata" -}}
name: {{ .name }}
labels: {app.kubernetes.io/instance: {{ include "run" .root }}}
{{- with lookup "jobset.x-k8s.io/v1alpha2" "JobSet" .root.Release.Namespace (include "run" .root) }}
ownerReferences:
  - {apiVersion: {{ .apiVersion }}, kind: JobSet, name: {{ .metadata.name }}, uid: {{ .metadata.uid }}, blockOwnerDeletion: true}
{{- end }}
{{- end }}

{{- define "count" }}{{ dig "count" 1 . | int }}{{ end }}

{{- /* options of a role, NAME=VALUE with a value in YAML, as a map. */}}
{{- define "options" }}{{ range .options }}{{ regexReplaceAllLiteral "^([^=]+)=" . "" | printf "%s: %s\n" (splitList "=" . | first) }}{{ end }}{{ end }}

{{- define "key" }}{{ get (dict "head" "join.keys.toml" "learners" "join.learner.toml" "runners" "join.toml") . }}{{ end }}

{{- /* The command of a pod, as JSON. The head's keys must be its own, and writable. */}}
{{- define "command" -}}
{{- $values := .root.Values }}
{{- $asked := get $values .role }}
{{- $more := $asked.arguments | default list }}
{{- range $more }}{{ if hasPrefix "--run-dir" . }}{{ fail "leave out --run-dir: the run's directory is on its volume" }}{{ end }}{{ end }}
{{- $command := list "python" "-m" "rlzmq" (trimSuffix "s" .role) "--join" (printf "/join/%s" (include "key" .role)) }}
{{- if eq .role "head" }}
  {{- $command = concat (list "sh" "-c" "install -m 600 /keys/join.keys.toml /join/ && exec \"$@\"" "sh" "python" "-m" "rlzmq" "train") $values.train }}
  {{- $command = concat $command (list "--run-dir" (printf "/work/runs/%s" .root.Release.Name) "--resume" "auto") }}
  {{- $command = concat $command (list "--listen" "tcp://$(POD_IP):5555" "--join-file" "/join/join.toml") }}
  {{- $command = concat $command (list "--advertise" (printf "%[1]s-head-0-0.%[1]s" (include "run" .root))) }}
  {{- if $values.runners }}{{ $command = concat $command (list "--env-runners" "0") }}{{ end }}
  {{- with $values.learners }}
    {{- $command = concat $command (list "--learners" (include "count" .) "--num-remote-learners" (include "count" .)) }}
  {{- end }}
{{- else if eq .role "runners" }}
  {{- $command = concat $command (list "--timeout" "600" "--patience" "600") }}{{/* the head may come back as late */}}
{{- end }}
{{- concat $command $more | toJson }}
{{- end }}

{{- /* The template of a role's pods. options are further fields of the pod, or of the role's other objects. */}}
{{- define "pod" -}}
metadata:
  labels: {{- include "labels" . | nindent 4 }}
spec:
  {{- $options := omit (include "options" (get .root.Values .role) | fromYaml) "storage" "maxReplicas" }}
  {{- mergeOverwrite (include "spec" . | fromYaml) $options | toYaml | nindent 2 }}
{{- end }}

{{- define "spec" -}}
{{- $run := include "run" .root }}
{{- $asked := get .root.Values .role }}
{{- $isHead := eq .role "head" }}
automountServiceAccountToken: false
restartPolicy: {{ eq .role "runners" | ternary "Always" "Never" }}
terminationGracePeriodSeconds: 120
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
containers:
  - name: {{ .role }}
    image: {{ $asked.image | default .root.Values.head.image | required "head.image is missing: name one with rlzmq and your code" }}
    command: {{ include "command" . }}
    workingDir: /work
    env:
      - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
      - {name: HOME, value: /tmp}
      - {name: OMP_NUM_THREADS, value: {{ $asked.cpus | default 1 | quote }}}
    resources:
      requests:
        cpu: {{ $asked.cpus | default 1 | quote }}
        {{- with $asked.memory }}{{ dict "memory" . | toYaml | nindent 8 }}{{ end }}
      limits: {{- merge (empty $asked.memory | ternary dict (dict "memory" $asked.memory)) (empty $asked.gpus | ternary dict (dict "nvidia.com/gpu" ($asked.gpus | toString))) | toYaml | nindent 8 }}
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities: {drop: [ALL]}
    volumeMounts:
      - {name: tmp, mountPath: /tmp}
      - {name: shm, mountPath: /dev/shm}
      - {name: keys, mountPath: {{ $isHead | ternary "/keys" "/join" }}}
      {{- if $isHead }}
      - {name: join, mountPath: /join}
      - {name: runs, mountPath: /work/runs}
      {{- end }}
    {{- if $isHead }}
    startupProbe: {tcpSocket: {port: 5555}, periodSeconds: 10, failureThreshold: 60}
    readinessProbe: {tcpSocket: {port: 5555}, periodSeconds: 10}
    livenessProbe: {tcpSocket: {port: 5555}, periodSeconds: 10, failureThreshold: 30}
    {{- else }}{{/* connected to the head's port 5555, or 5557 */}}
    readinessProbe:
      exec: {command: [grep, -q, ":{{ eq .role "runners" | ternary "15B3" "15B5" }} 01 ", /proc/net/tcp, /proc/net/tcp6]}
    {{- end }}
volumes:
  - {name: tmp, emptyDir: {}}
  - {name: shm, emptyDir: {medium: Memory}}
  - name: keys
    secret:
      secretName: {{ $run }}
      defaultMode: 256
      items: [{key: {{ include "key" .role }}, path: {{ include "key" .role }}}]
  {{- if $isHead }}
  - {name: join, emptyDir: {}}
  - {name: runs, persistentVolumeClaim: {claimName: {{ $run }}}}
  {{- end }}
{{- end }}
