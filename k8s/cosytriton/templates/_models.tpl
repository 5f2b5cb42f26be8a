{{/* What happens before the server starts. */}}
{{- define "cosytriton.initContainers" -}}
{{- if eq .Values.models.source "objectStore" }}
{{ include "cosytriton.fetchModels" . }}
{{- end }}
{{- if .Values.engines.enabled }}
{{ include "cosytriton.waitForEngines" . }}
{{- end }}
{{- end -}}

{{/* It asks for the GPU, which the key names, and gives it back before the server starts. */}}
{{- define "cosytriton.waitForEngines" -}}
- name: wait-for-engines
  image: {{ include "cosytriton.image" . | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [timeout, {{ .Values.engines.waitSeconds | quote }}, cosytriton]
  args: [build, --profile={{ .Values.profile }}, --repository=/models, --engines=/engines, --wait]
  {{- include "cosytriton.containerSecurity" . | nindent 2 }}
  {{- include "cosytriton.resources" (dict "top" . "resources" .Values.resources "gpus" .Values.gpu.count) | nindent 2 }}
  volumeMounts:
    {{- include "cosytriton.modelsMount" . | nindent 4 }}
    {{- include "cosytriton.enginesMount" (dict "top" . "readOnly" true) | nindent 4 }}
    - name: tmp
      mountPath: /tmp
{{- end -}}

{{- define "cosytriton.fetchModels" -}}
- name: fetch-models
  image: {{ .Values.models.objectStore.image | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [rclone, copy, --checksum, --transfers=8, {{ .Values.models.objectStore.path | quote }}, /models]
  {{- with .Values.models.objectStore.secret }}
  envFrom:
    - secretRef:
        name: {{ . }}
  {{- end }}
  env:
    - name: HOME
      value: /tmp
  {{- include "cosytriton.containerSecurity" . | nindent 2 }}
  {{- include "cosytriton.small" . | nindent 2 }}
  volumeMounts:
    - name: models
      mountPath: /models
    - name: tmp
      mountPath: /tmp
{{- end -}}

{{/* Resources of a container that only waits or copies. */}}
{{- define "cosytriton.small" -}}
resources:
  requests: { cpu: 100m, memory: 128Mi }
  limits: { memory: 1Gi }
{{- end -}}

{{- define "cosytriton.enginesMount" -}}
- name: engines
  mountPath: /engines
  {{- with .top.Values.engines.subPath }}
  subPath: {{ . }}
  {{- end }}
  {{- if .readOnly }}
  readOnly: true
  {{- end }}
{{- end -}}

{{- define "cosytriton.modelsMount" -}}
{{- $source := index .Values.models .Values.models.source -}}
- name: models
  mountPath: /models
  {{- with $source.subPath }}
  subPath: {{ . }}
  {{- end }}
  readOnly: true
{{- end -}}

{{/* The volume of the models' source. */}}
{{- define "cosytriton.modelsVolume" -}}
- name: models
{{- with .Values.models }}
  {{- if eq .source "claim" }}
  persistentVolumeClaim:
    claimName: {{ .claim.name }}
    readOnly: true
  {{- else if eq .source "image" }}
  image:
    reference: {{ .image.reference | quote }}
    pullPolicy: {{ .image.pullPolicy }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ .objectStore.size }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Everything that the server mounts, and the volumes of it. */}}
{{- define "cosytriton.mounts" -}}
{{ include "cosytriton.modelsMount" . }}
{{- if .Values.engines.enabled }}
{{ include "cosytriton.enginesMount" (dict "top" . "readOnly" true) }}
{{- end }}
{{- with .Values.voices }}
{{- if .claim }}
- name: voices
  mountPath: /voices
  {{- with .subPath }}
  subPath: {{ . }}
  {{- end }}
  readOnly: {{ .readOnly }}
{{- end }}
{{- end }}
{{- if .Values.tls.secret }}
- name: tls
  mountPath: /tls
  readOnly: true
{{- end }}
{{- if .Values.admin.secret }}
- name: admin
  mountPath: /admin
  readOnly: true
{{- end }}
- name: shm
  mountPath: /dev/shm
- name: tmp
  mountPath: /tmp
{{- end -}}

{{- define "cosytriton.volumes" -}}
{{ include "cosytriton.modelsVolume" . }}
{{- if .Values.engines.enabled }}
- name: engines
  persistentVolumeClaim:
    claimName: {{ .Values.engines.claim }}
    readOnly: true
{{- end }}
{{- with .Values.voices }}
{{- if .claim }}
- name: voices
  persistentVolumeClaim:
    claimName: {{ .claim }}
    readOnly: {{ .readOnly }}
{{- end }}
{{- end }}
{{- with .Values.tls.secret }}
- name: tls
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- with .Values.admin.secret }}
- name: admin
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.sharedMemory }}
- name: tmp
  emptyDir:
    sizeLimit: {{ .Values.temporary }}
{{- end -}}
