// A small tape autograd. A node saves the addresses of the parameters that it used, as autograd
// engines do; whoever moves a parameter re-points the nodes with bind(). Knows nothing of zshard
// but the type that says where a parameter lies.
#pragma once

#include <cstddef>
#include <functional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "tests/wrap/kernels.hpp"
#include "tests/wrap/plain.hpp"

namespace zshard::wrap {

/// A matrix of the graph: [rows, columns] of values and of gradients.
struct Variable {
  int rows = 0;
  int columns = 0;
  Tensor value;
  Tensor gradient;
};

class Tape {
 public:
  using Id = std::size_t;  // of a variable
  /// Called in backward around each run of nodes that use one module's parameters.
  struct Hooks {
    std::function<void(int module)> enter;
    std::function<void(int module)> leave;
  };

  explicit Tape(int parameters) : addresses_(static_cast<std::size_t>(parameters)) {}

  /// Where a parameter lies now, or that it is gone: for nodes to come and for those on the tape.
  void bind(const Binding& binding) {
    Saved& address = addresses_.at(static_cast<std::size_t>(binding.parameter.value));
    address = {binding.parameter, static_cast<float*>(binding.data),
               static_cast<float*>(binding.gradient), binding.mode};
    for (Node& node : nodes_) {
      for (Saved& saved : node.saved) {
        if (saved.parameter == binding.parameter) saved = address;
      }
    }
  }

  /// Nodes recorded from here on belong to the module.
  void module(int module) { module_ = module; }

  void clear() {
    nodes_.clear();
    variables_.clear();
  }

  Id input(int rows, int columns, Tensor values) {
    const Id id = variable(rows, columns);
    variables_[id].value = std::move(values);
    return id;
  }

  /// x[rows, in] w[out, in]^T + b[out]
  Id linear(Id x, ParameterId w, ParameterId b, int out) {
    const int rows = variables_[x].rows;
    const Id y = variable(rows, out);
    Node& node = record(Kind::linear, x, y, {w, b});
    linear_forward(variables_[y].value.data(), variables_[x].value.data(), node.saved[0].data,
                   node.saved[1].data, rows, variables_[x].columns, out);
    return y;
  }

  /// x[rows, columns] * s[columns]
  Id scale(Id x, ParameterId s) {
    const int columns = variables_[x].columns;
    const Id y = variable(variables_[x].rows, columns);
    const Node& node = record(Kind::scale, x, y, {s});
    for (std::size_t i = 0; i < variables_[y].value.size(); ++i) {
      variables_[y].value[i] =
          variables_[x].value[i] * node.saved[0].data[i % static_cast<std::size_t>(columns)];
    }
    return y;
  }

  Id tanh(Id x) {
    const Id y = variable(variables_[x].rows, variables_[x].columns);
    record(Kind::tanh, x, y, {});
    tanh_forward(variables_[y].value.data(), variables_[x].value.data(), size(y));
    return y;
  }

  Id add(Id a, Id b) {
    const Id y = variable(variables_[a].rows, variables_[a].columns);
    record(Kind::add, a, y, {}).other = b;
    for (std::size_t i = 0; i < variables_[y].value.size(); ++i)
      variables_[y].value[i] = variables_[a].value[i] + variables_[b].value[i];
    return y;
  }

  /// Half the squared distance from target, and its gradient.
  float loss(Id y, const Tensor& target) {
    Variable& v = variables_[y];
    return squared_error(v.gradient.data(), v.value.data(), target.data(), size(y));
  }

  /// From the last node to the first. May run on another thread than forward.
  void backward(const Hooks& hooks) {
    int inside = kNoModule;
    for (std::size_t n = nodes_.size(); n-- > 0;) {
      const int module = nodes_[n].saved.empty() ? inside : nodes_[n].module;
      if (module != inside) {
        if (inside != kNoModule) hooks.leave(inside);
        hooks.enter(module);
        inside = module;
      }
      backward(nodes_[n]);
    }
    if (inside != kNoModule) hooks.leave(inside);
  }

 private:
  enum class Kind { linear, scale, tanh, add };
  struct Saved {
    ParameterId parameter;
    float* data = nullptr;
    float* gradient = nullptr;
    GradientMode mode = GradientMode::accumulate;
  };
  struct Node {
    Kind kind;
    int module;
    Id in, other, out;
    std::vector<Saved> saved;
  };
  static constexpr int kNoModule = -1;

  Id variable(int rows, int columns) {
    const auto count = static_cast<std::size_t>(rows * columns);
    variables_.push_back({rows, columns, Tensor(count), Tensor(count)});
    return variables_.size() - 1;
  }
  [[nodiscard]] int size(Id id) const { return variables_[id].rows * variables_[id].columns; }

  Node& record(Kind kind, Id in, Id out, const std::vector<ParameterId>& parameters) {
    Node node{kind, module_, in, in, out, {}};
    for (const ParameterId p : parameters) {
      const Saved& address = addresses_.at(static_cast<std::size_t>(p.value));
      if (address.data == nullptr) throw std::logic_error("a parameter is used while it is gone");
      node.saved.push_back(address);
    }
    nodes_.push_back(std::move(node));
    return nodes_.back();
  }

  /// Once a node has written a gradient, other nodes of the same run add to it.
  void written(const Saved& by) {
    const ParameterId parameter = by.parameter;
    for (Node& node : nodes_) {
      for (Saved& saved : node.saved) {
        if (saved.parameter == parameter) saved.mode = GradientMode::accumulate;
      }
    }
  }

  void backward(const Node& node) {
    Variable& x = variables_[node.in];
    const Variable& y = variables_[node.out];
    Tensor dx(x.value.size());
    switch (node.kind) {
      case Kind::linear: {
        const Saved& w = node.saved[0];
        const Saved& b = node.saved[1];
        linear_backward(dx.data(), w.gradient, nullptr, y.gradient.data(), x.value.data(), w.data,
                        x.rows, x.columns, y.columns, w.mode);
        linear_backward(nullptr, nullptr, b.gradient, y.gradient.data(), x.value.data(), w.data,
                        x.rows, x.columns, y.columns, b.mode);
        break;
      }
      case Kind::scale: {
        const Saved& s = node.saved[0];
        for (int c = 0; c < x.columns; ++c) {
          float sum = 0.0f;
          for (int r = 0; r < x.rows; ++r) {
            const auto i = static_cast<std::size_t>(r * x.columns + c);
            sum += y.gradient[i] * x.value[i];
            dx[i] = y.gradient[i] * s.data[c];
          }
          put(s.gradient[c], sum, s.mode);
        }
        break;
      }
      case Kind::tanh:
        tanh_backward(dx.data(), y.gradient.data(), y.value.data(), size(node.out));
        break;
      case Kind::add: {
        dx = y.gradient;
        Tensor& other = variables_[node.other].gradient;
        for (std::size_t i = 0; i < other.size(); ++i) other[i] += y.gradient[i];
        break;
      }
    }
    for (std::size_t i = 0; i < dx.size(); ++i) x.gradient[i] += dx[i];
    for (const Saved& saved : node.saved) written(saved);
  }

  std::vector<Saved> addresses_;  // by parameter
  std::vector<Variable> variables_;
  std::vector<Node> nodes_;
  int module_ = kNoModule;
};

}  // namespace zshard::wrap
