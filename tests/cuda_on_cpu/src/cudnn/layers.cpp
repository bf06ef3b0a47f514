// Pooling, softmax, batch normalisation and reductions.
#include "library.h"

#include <limits>

cudnnStatus_t cudnnSetPoolingNdDescriptor(cudnnPoolingDescriptor_t desc, cudnnPoolingMode_t mode, cudnnNanPropagation_t,
                                          int length, const int window[], const int pad[], const int stride[]) {
  if (length < 2 || length > 3) return CUDNN_STATUS_NOT_SUPPORTED;
  desc->mode = mode;
  desc->length = length;
  std::copy(window, window + length, desc->window);
  std::copy(pad, pad + length, desc->pad);
  std::copy(stride, stride + length, desc->stride);
  return CUDNN_STATUS_SUCCESS;
}

// Calls visit(output, inputs of its window) for each output. Windows end at the border of the images.
template<class Function>
static void each_window(const cudnnPoolingStruct &pooling, const Shape &x, const Shape &y, const Function &visit) {
  const int first = 3 - pooling.length;
  int in[3], out[3], window[3], pad[3], stride[3];
  for (int i = 0; i < 3; i++) {
    const int from = i - first;
    in[i] = from < 0 ? 1 : x.dims[2 + from];
    out[i] = from < 0 ? 1 : y.dims[2 + from];
    window[i] = from < 0 ? 1 : pooling.window[from];
    pad[i] = from < 0 ? 0 : pooling.pad[from];
    stride[i] = from < 0 ? 1 : pooling.stride[from];
  }
  std::vector<long> inputs;
  long output = 0;
  for (long map = 0; map < (long)x.dims[0] * x.dims[1]; map++)
    for (int o0 = 0; o0 < out[0]; o0++)
      for (int o1 = 0; o1 < out[1]; o1++)
        for (int o2 = 0; o2 < out[2]; o2++, output++) {
          inputs.clear();
          for (int w0 = 0; w0 < window[0]; w0++)
            for (int w1 = 0; w1 < window[1]; w1++)
              for (int w2 = 0; w2 < window[2]; w2++) {
                const int i0 = o0 * stride[0] - pad[0] + w0, i1 = o1 * stride[1] - pad[1] + w1;
                const int i2 = o2 * stride[2] - pad[2] + w2;
                if (i0 < 0 || i1 < 0 || i2 < 0 || i0 >= in[0] || i1 >= in[1] || i2 >= in[2]) continue;
                inputs.push_back(((map * in[0] + i0) * in[1] + i1) * in[2] + i2);
              }
          visit(output, inputs);
        }
}

static bool takes_maximum(const cudnnPoolingStruct &pooling) {
  return pooling.mode == CUDNN_POOLING_MAX || pooling.mode == CUDNN_POOLING_MAX_DETERMINISTIC;
}

// The number of elements that an average divides by.
static double divisor(const cudnnPoolingStruct &pooling, size_t inputs) {
  if (pooling.mode == CUDNN_POOLING_AVERAGE_COUNT_EXCLUDE_PADDING) return inputs;
  double product = 1;
  for (int i = 0; i < pooling.length; i++) product *= pooling.window[i];
  return product;
}

cudnnStatus_t cudnnPoolingForward(cudnnHandle_t handle, const cudnnPoolingDescriptor_t pooling_, const void *alpha_,
                                  const cudnnTensorDescriptor_t x_, const void *x_data, const void *beta_,
                                  const cudnnTensorDescriptor_t y_, void *y_data) {
  const Shape x = *x_, y = *y_;
  const cudnnPoolingStruct pooling = *pooling_;
  const double alpha = scalar(x, alpha_), beta = scalar(x, beta_);
  return enqueue(handle, "cudnnPoolingForward", [=] {
    if (!check("cudnnPoolingForward", {extent(x, x_data), extent(y, y_data)})) return ILLEGAL_ADDRESS;
    const std::vector<double> xs = load(x, x_data);
    std::vector<double> ys(y.size());
    each_window(pooling, x, y, [&](long output, const std::vector<long> &inputs) {
      double most = -std::numeric_limits<double>::infinity(), sum = 0;
      for (long input : inputs) {
        most = xs[input] > most || std::isnan(xs[input]) ? xs[input] : most;
        sum += xs[input];
      }
      ys[output] = takes_maximum(pooling) ? most : sum / divisor(pooling, inputs.size());
    });
    store(y, y_data, ys, alpha, beta);
    return 0;
  });
}

cudnnStatus_t cudnnPoolingBackward(cudnnHandle_t handle, const cudnnPoolingDescriptor_t pooling_, const void *alpha_,
                                   const cudnnTensorDescriptor_t y_, const void *y_data,
                                   const cudnnTensorDescriptor_t dy_, const void *dy_data,
                                   const cudnnTensorDescriptor_t x_, const void *x_data, const void *beta_,
                                   const cudnnTensorDescriptor_t dx_, void *dx_data) {
  const Shape x = *x_, y = *y_, dy = *dy_, dx = *dx_;
  const cudnnPoolingStruct pooling = *pooling_;
  const double alpha = scalar(x, alpha_), beta = scalar(x, beta_);
  return enqueue(handle, "cudnnPoolingBackward", [=] {
    if (!check("cudnnPoolingBackward",
               {extent(x, x_data), extent(y, y_data), extent(dx, dx_data), extent(dy, dy_data)}))
      return ILLEGAL_ADDRESS;
    const std::vector<double> xs = load(x, x_data), ys = load(y, y_data), dys = load(dy, dy_data);
    std::vector<double> dxs(dx.size());
    each_window(pooling, x, y, [&](long output, const std::vector<long> &inputs) {
      for (long input : inputs) {
        if (!takes_maximum(pooling)) {
          dxs[input] += dys[output] / divisor(pooling, inputs.size());
        } else if (xs[input] == ys[output]) {  // of several maxima the first one has the gradient
          dxs[input] += dys[output];
          break;
        }
      }
    });
    store(dx, dx_data, dxs, alpha, beta);
    return 0;
  });
}

// Calls visit(elements) for each set of elements whose exponentials add up to 1.
template<class Function> static void each_sum(cudnnSoftmaxMode_t mode, const Shape &x, const Function &visit) {
  long inner = 1, classes = x.dims[1];
  for (int i = 2; i < x.rank; i++) inner *= x.dims[i];
  if (mode == CUDNN_SOFTMAX_MODE_INSTANCE) classes *= inner, inner = 1;
  std::vector<long> elements(classes);
  for (int image = 0; image < x.dims[0]; image++)
    for (long i = 0; i < inner; i++) {
      for (long k = 0; k < classes; k++) elements[k] = (image * classes + k) * inner + i;
      visit(elements);
    }
}

cudnnStatus_t cudnnSoftmaxForward(cudnnHandle_t handle, cudnnSoftmaxAlgorithm_t algo, cudnnSoftmaxMode_t mode,
                                  const void *alpha_, const cudnnTensorDescriptor_t x_, const void *x_data,
                                  const void *beta_, const cudnnTensorDescriptor_t y_, void *y_data) {
  const Shape x = *x_, y = *y_;
  const double alpha = scalar(x, alpha_), beta = scalar(x, beta_);
  return enqueue(handle, "cudnnSoftmaxForward", [=] {
    if (!check("cudnnSoftmaxForward", {extent(x, x_data), extent(y, y_data)})) return ILLEGAL_ADDRESS;
    std::vector<double> xs = load(x, x_data);
    each_sum(mode, x, [&](const std::vector<long> &elements) {
      double most = xs[elements[0]], sum = 0;
      for (long k : elements) most = std::max(most, xs[k]);
      for (long k : elements) sum += std::exp(xs[k] - most);
      for (long k : elements)
        xs[k] = algo == CUDNN_SOFTMAX_LOG ? xs[k] - most - std::log(sum) : std::exp(xs[k] - most) / sum;
    });
    store(y, y_data, xs, alpha, beta);
    return 0;
  });
}

cudnnStatus_t cudnnSoftmaxBackward(cudnnHandle_t handle, cudnnSoftmaxAlgorithm_t algo, cudnnSoftmaxMode_t mode,
                                   const void *alpha_, const cudnnTensorDescriptor_t y_, const void *y_data,
                                   const cudnnTensorDescriptor_t dy_, const void *dy_data, const void *beta_,
                                   const cudnnTensorDescriptor_t dx_, void *dx_data) {
  const Shape y = *y_, dy = *dy_, dx = *dx_;
  const double alpha = scalar(y, alpha_), beta = scalar(y, beta_);
  return enqueue(handle, "cudnnSoftmaxBackward", [=] {
    if (!check("cudnnSoftmaxBackward", {extent(y, y_data), extent(dy, dy_data), extent(dx, dx_data)}))
      return ILLEGAL_ADDRESS;
    const std::vector<double> ys = load(y, y_data), dys = load(dy, dy_data);
    std::vector<double> dxs(dx.size());
    const bool log = algo == CUDNN_SOFTMAX_LOG;
    each_sum(mode, y, [&](const std::vector<long> &elements) {
      double sum = 0;
      for (long k : elements) sum += log ? dys[k] : dys[k] * ys[k];
      for (long k : elements) dxs[k] = log ? dys[k] - std::exp(ys[k]) * sum : (dys[k] - sum) * ys[k];
    });
    store(dx, dx_data, dxs, alpha, beta);
    return 0;
  });
}

// The parameters of batch normalisation, each with the number of the elements of the images that it stands for.
struct Statistics {
  std::vector<long> of;  // element of the images -> parameter
  long parameters, elements;

  Statistics(cudnnBatchNormMode_t mode, const Shape &x) {
    long inner = 1;
    for (int i = 2; i < x.rank; i++) inner *= x.dims[i];
    const bool spatial = mode == CUDNN_BATCHNORM_SPATIAL;
    parameters = spatial ? x.dims[1] : x.dims[1] * inner;
    elements = x.size() / parameters;
    for (long i = 0; i < x.size(); i++) of.push_back(spatial ? i / inner % x.dims[1] : i % parameters);
  }
  template<class Function> std::vector<double> sums(const Function &value) const {
    std::vector<double> result(parameters);
    for (long i = 0; i < (long)of.size(); i++) result[of[i]] += value(i);
    return result;
  }
};

cudnnStatus_t cudnnBatchNormalizationForwardTraining(
    cudnnHandle_t handle, cudnnBatchNormMode_t mode, const void *alpha_, const void *beta_,
    const cudnnTensorDescriptor_t x_, const void *x_data, const cudnnTensorDescriptor_t y_, void *y_data,
    const cudnnTensorDescriptor_t p_, const void *scale_data, const void *bias_data, double factor, void *mean_data,
    void *variance_data, double epsilon, void *saved_mean, void *saved_inverse) {
  if (epsilon < 1e-5) return CUDNN_STATUS_BAD_PARAM;
  const Shape x = *x_, y = *y_, p = *p_;
  const double alpha = scalar(x, alpha_), beta = scalar(x, beta_);
  return enqueue(handle, "cudnnBatchNormalizationForwardTraining", [=] {
    const size_t running = mean_data ? p.bytes() : 0, saved = saved_mean ? p.bytes() : 0;
    if (!check("cudnnBatchNormalizationForwardTraining",
               {extent(x, x_data), extent(y, y_data), extent(p, scale_data), extent(p, bias_data),
                {mean_data, running}, {variance_data, running}, {saved_mean, saved}, {saved_inverse, saved}}))
      return ILLEGAL_ADDRESS;
    const Statistics statistics(mode, x);
    const double count = statistics.elements;
    std::vector<double> xs = load(x, x_data), scale = load(p, scale_data), bias = load(p, bias_data);
    std::vector<double> mean = statistics.sums([&](long i) { return xs[i] / count; });
    std::vector<double> variance = statistics.sums([&](long i) {
      const double distance = xs[i] - mean[statistics.of[i]];
      return distance * distance / count;
    });
    std::vector<double> inverse(variance);
    for (double &each : inverse) each = 1 / std::sqrt(each + epsilon);
    for (long i = 0; i < (long)xs.size(); i++) {
      const long k = statistics.of[i];
      xs[i] = scale[k] * (xs[i] - mean[k]) * inverse[k] + bias[k];
    }
    store(y, y_data, xs, alpha, beta);
    if (saved) store(p, saved_mean, mean, 1, 0), store(p, saved_inverse, inverse, 1, 0);
    if (running) {
      store(p, mean_data, mean, factor, 1 - factor);
      for (double &each : variance) each *= count > 1 ? count / (count - 1) : 1;
      store(p, variance_data, variance, factor, 1 - factor);
    }
    return 0;
  });
}

cudnnStatus_t cudnnBatchNormalizationForwardInference(
    cudnnHandle_t handle, cudnnBatchNormMode_t mode, const void *alpha_, const void *beta_,
    const cudnnTensorDescriptor_t x_, const void *x_data, const cudnnTensorDescriptor_t y_, void *y_data,
    const cudnnTensorDescriptor_t p_, const void *scale_data, const void *bias_data, const void *mean_data,
    const void *variance_data, double epsilon) {
  if (epsilon < 1e-5) return CUDNN_STATUS_BAD_PARAM;
  const Shape x = *x_, y = *y_, p = *p_;
  const double alpha = scalar(x, alpha_), beta = scalar(x, beta_);
  return enqueue(handle, "cudnnBatchNormalizationForwardInference", [=] {
    if (!check("cudnnBatchNormalizationForwardInference",
               {extent(x, x_data), extent(y, y_data), extent(p, scale_data), extent(p, bias_data),
                extent(p, mean_data), extent(p, variance_data)}))
      return ILLEGAL_ADDRESS;
    const Statistics statistics(mode, x);
    std::vector<double> xs = load(x, x_data), scale = load(p, scale_data), bias = load(p, bias_data);
    const std::vector<double> mean = load(p, mean_data), variance = load(p, variance_data);
    for (long i = 0; i < (long)xs.size(); i++) {
      const long k = statistics.of[i];
      xs[i] = scale[k] * (xs[i] - mean[k]) / std::sqrt(variance[k] + epsilon) + bias[k];
    }
    store(y, y_data, xs, alpha, beta);
    return 0;
  });
}

cudnnStatus_t cudnnBatchNormalizationBackward(
    cudnnHandle_t handle, cudnnBatchNormMode_t mode, const void *alpha_data, const void *beta_data,
    const void *alpha_parameters, const void *beta_parameters, const cudnnTensorDescriptor_t x_, const void *x_data,
    const cudnnTensorDescriptor_t dy_, const void *dy_data, const cudnnTensorDescriptor_t dx_, void *dx_data,
    const cudnnTensorDescriptor_t p_, const void *scale_data, void *dscale_data, void *dbias_data, double,
    const void *saved_mean, const void *saved_inverse) {
  const Shape x = *x_, dy = *dy_, dx = *dx_, p = *p_;
  const double alpha = scalar(x, alpha_data), beta = scalar(x, beta_data);
  const double alpha_p = scalar(x, alpha_parameters), beta_p = scalar(x, beta_parameters);
  return enqueue(handle, "cudnnBatchNormalizationBackward", [=] {
    if (!check("cudnnBatchNormalizationBackward",
               {extent(x, x_data), extent(dy, dy_data), extent(dx, dx_data), extent(p, scale_data),
                extent(p, dscale_data), extent(p, dbias_data), extent(p, saved_mean), extent(p, saved_inverse)}))
      return ILLEGAL_ADDRESS;
    const Statistics statistics(mode, x);
    const std::vector<double> xs = load(x, x_data), dys = load(dy, dy_data), scale = load(p, scale_data);
    const std::vector<double> mean = load(p, saved_mean), inverse = load(p, saved_inverse);
    const auto normal = [&](long i) { return (xs[i] - mean[statistics.of[i]]) * inverse[statistics.of[i]]; };
    const std::vector<double> dbias = statistics.sums([&](long i) { return dys[i]; });
    const std::vector<double> dscale = statistics.sums([&](long i) { return dys[i] * normal(i); });
    std::vector<double> dxs(xs.size());
    for (long i = 0; i < (long)xs.size(); i++) {
      const long k = statistics.of[i];
      dxs[i] = scale[k] * inverse[k] * (dys[i] - (dbias[k] + normal(i) * dscale[k]) / statistics.elements);
    }
    store(dx, dx_data, dxs, alpha, beta);
    store(p, dscale_data, dscale, alpha_p, beta_p);
    store(p, dbias_data, dbias, alpha_p, beta_p);
    return 0;
  });
}

cudnnStatus_t cudnnSetReduceTensorDescriptor(cudnnReduceTensorDescriptor_t desc, cudnnReduceTensorOp_t op,
                                             cudnnDataType_t, cudnnNanPropagation_t, cudnnReduceTensorIndices_t indices,
                                             cudnnIndicesType_t) {
  desc->op = op;
  desc->indices = indices == CUDNN_REDUCE_TENSOR_FLATTENED_INDICES;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetReductionIndicesSize(cudnnHandle_t, const cudnnReduceTensorDescriptor_t,
                                           const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t c,
                                           size_t *bytes) {
  *bytes = c->size() * sizeof(uint32_t);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnGetReductionWorkspaceSize(cudnnHandle_t handle, const cudnnReduceTensorDescriptor_t,
                                             const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t,
                                             size_t *bytes) {
  *bytes = 256;
  return is_current(handle, "cudnnGetReductionWorkspaceSize") ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_EXECUTION_FAILED;
}

// What a sum of values begins with, and how the next one is added.
static double start_of(cudnnReduceTensorOp_t op) {
  if (op == CUDNN_REDUCE_TENSOR_MUL) return 1;
  if (op == CUDNN_REDUCE_TENSOR_MIN) return std::numeric_limits<double>::infinity();
  return op == CUDNN_REDUCE_TENSOR_MAX ? -std::numeric_limits<double>::infinity() : 0;
}

static double added(cudnnReduceTensorOp_t op, double sum, double value) {
  switch (op) {
    case CUDNN_REDUCE_TENSOR_MUL: return sum * value;
    case CUDNN_REDUCE_TENSOR_MIN: return value < sum || std::isnan(value) ? value : sum;
    case CUDNN_REDUCE_TENSOR_MAX: return value > sum || std::isnan(value) ? value : sum;
    case CUDNN_REDUCE_TENSOR_AMAX: return std::max(sum, std::fabs(value));
    case CUDNN_REDUCE_TENSOR_NORM1: return sum + std::fabs(value);
    case CUDNN_REDUCE_TENSOR_NORM2: return sum + value * value;
    default: return sum + value;
  }
}

cudnnStatus_t cudnnReduceTensor(cudnnHandle_t handle, const cudnnReduceTensorDescriptor_t desc, void *indices,
                                size_t indices_bytes, void *workspace, size_t bytes, const void *alpha_,
                                const cudnnTensorDescriptor_t a_, const void *a_data, const void *beta_,
                                const cudnnTensorDescriptor_t c_, void *c_data) {
  const Shape a = *a_, c = *c_;
  const cudnnReduceTensorOp_t op = desc->op;
  const bool with_indices = desc->indices;
  const double alpha = scalar(a, alpha_), beta = scalar(a, beta_);
  if (a.rank != c.rank || (with_indices && indices_bytes < c.size() * sizeof(uint32_t))) return CUDNN_STATUS_BAD_PARAM;
  return enqueue(handle, "cudnnReduceTensor", [=] {
    const size_t needed = with_indices ? c.size() * sizeof(uint32_t) : 0;
    if (!check("cudnnReduceTensor", {extent(a, a_data), extent(c, c_data), {indices, needed}, {workspace, bytes}}))
      return ILLEGAL_ADDRESS;
    const std::vector<double> values = load(a, a_data);
    std::vector<double> sums(c.size(), start_of(op));
    for (long i = 0; i < (long)values.size(); i++) {
      long rest = i, output = 0, position = 0, output_step = 1, position_step = 1;
      for (int k = a.rank - 1; k >= 0; k--) {  // a reduced dimension has one element in c
        const long index = rest % a.dims[k];
        rest /= a.dims[k];
        if (c.dims[k] == a.dims[k]) output += index * output_step, output_step *= c.dims[k];
        else position += index * position_step, position_step *= a.dims[k];
      }
      const double sum = added(op, sums[output], values[i]);
      if (with_indices && sum != sums[output]) ((uint32_t *)indices)[output] = (uint32_t)position;
      sums[output] = sum;
    }
    for (double &sum : sums) {
      if (op == CUDNN_REDUCE_TENSOR_AVG) sum *= (double)sums.size() / values.size();
      if (op == CUDNN_REDUCE_TENSOR_NORM2) sum = std::sqrt(sum);
    }
    store(c, c_data, sums, alpha, beta);
    return 0;
  });
}
