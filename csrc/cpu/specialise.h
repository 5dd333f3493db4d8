// Turns run-time switches into template arguments: specialise(f, a, b) calls f(A{}, B{}), where A and B are
// std::true_type or std::false_type.
#pragma once

#include <type_traits>

namespace bytesplat {

template <class Function> inline void specialise(Function function) { function(); }

template <class Function, class... Rest> inline void specialise(Function function, bool next, Rest... rest) {
    const auto choose = [&](auto chosen) {
        specialise([&](auto... others) { function(chosen, others...); }, rest...);
    };
    next ? choose(std::true_type{}) : choose(std::false_type{});
}

}  // namespace bytesplat
