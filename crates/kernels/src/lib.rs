//! What programs that run in host memory call instead of compiled code, where a loop in Rust is faster: host functions of a
//! plugin, which the lowerings of `oxitorch_aten` name.

mod channels;
mod rows;
mod scatter;
mod spmm;

use oxitorch_pjrt as pjrt;
use std::ops::Range;

/// Makes them known to a plugin.
///
/// # Errors
/// If the plugin does not take host functions.
pub fn register(plugin: &pjrt::Plugin) -> pjrt::Result<()> {
    channels::register(plugin)?;
    rows::register(plugin)?;
    scatter::register(plugin)?;
    spmm::register(plugin)
}

const UNKNOWN: &str = "a call that this version does not understand";

/// Elements that are worth a thread.
const PER_THREAD: usize = 1 << 14;

/// Parts of what has `places`, and in each of them `n`, in the order of memory: several places, or some of the `n` of one.
/// `elements` is how many there are to go through.
fn cut(elements: usize, places: usize, n: usize, threads: usize) -> Vec<(Range<usize>, Range<usize>)> {
    let parts = (elements / PER_THREAD).clamp(1, threads.max(1));
    let pieces =
        |size: usize, parts: usize| (0..parts).map(move |i| size * i / parts..size * (i + 1) / parts);
    if places >= parts {
        return pieces(places, parts).map(|some| (some, 0..n)).collect();
    }
    let each = parts.div_ceil(places.max(1)).min(n.max(1));
    (0..places).flat_map(|place| pieces(n, each).map(move |some| (place..place + 1, some))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_the_whole_in_order() {
        for (places, n, threads) in
            [(0, 5, 4), (1, 1 << 16, 4), (3, 1 << 16, 4), (1 << 10, 1 << 10, 4), (1, 1, 4), (2, 0, 3)]
        {
            let parts = cut(places * n * 2, places, n, threads);
            let flat = parts.iter().flat_map(|(places, some)| {
                places.clone().flat_map(move |place| some.clone().map(move |i| place * n + i))
            });
            assert!(flat.eq(0..places * n), "{places} {n} {threads}");
            assert!(parts.len() < threads + places.min(threads), "{} parts", parts.len());
        }
    }
}
