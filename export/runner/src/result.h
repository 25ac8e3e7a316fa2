// Results of what can fail. No exception crosses the library's boundary, and none is thrown on purpose.
#pragma once

#include <string>
#include <utility>
#include <variant>

namespace torchedge {

/// One line: what was given, what was expected, what to do next.
struct Error {
  std::string text;
};

/// A value, or why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result() = default;
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}
  bool ok() const { return state_.index() == 0; }
  T& value() { return std::get<0>(state_); }
  Error& error() { return std::get<1>(state_); }

 private:
  std::variant<T, Error> state_;
};

/// Success, or why not.
using Status = Result<std::monostate>;

}  // namespace torchedge

// Return the error of an expression to the caller, or go on: with a new variable, or with none.
#define TE_JOIN_(a, b) a##b
#define TE_JOIN(a, b) TE_JOIN_(a, b)
#define TE_TRY_(result, variable, expression) \
  auto result = (expression);                 \
  if (!result.ok()) return std::move(result.error()); \
  auto variable = std::move(result.value())
#define TE_TRY(variable, expression) TE_TRY_(TE_JOIN(result_, __LINE__), variable, expression)
#define TE_CHECK(expression)                                      \
  do {                                                            \
    if (auto status_ = (expression); !status_.ok()) return std::move(status_.error()); \
  } while (false)
