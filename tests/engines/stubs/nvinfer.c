/* What TensorRT's Python bindings want of its libraries to be imported. Nothing of it may be called. */
void createInferBuilder_INTERNAL(void) {}
void createInferRefitter_INTERNAL(void) {}
void createInferRuntime_INTERNAL(void) {}
void createNvOnnxParserRefitter_INTERNAL(void) {}
void createNvOnnxParser_INTERNAL(void) {}
void getBuilderPluginRegistry(void) {}
void getNvOnnxParserVersion(void) {}
void getPluginRegistry(void) {}
void initLibNvInferPlugins(void) {}
