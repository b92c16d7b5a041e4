//! Properties of inference and of the printed text, over random programs and attributes.

#[path = "plugin/generate.rs"]
mod generate;

use std::collections::HashSet;

use generate::{Choices, program};
use oxitorch_hlo::*;
use proptest::prelude::*;

fn numbers() -> impl Strategy<Value = Vec<u16>> {
    prop::collection::vec(any::<u16>(), 0..300)
}

fn built(numbers: &[u16], wild: bool) -> Result<Module, Error> {
    let b = Builder::new();
    let outputs = program(&b, &mut Choices::new(numbers), wild);
    b.finish(&outputs)
}

/// Every name is defined before it is used, once, and is used only inside the braces that define it.
fn check_names(text: &str) -> Result<(), String> {
    let mut scopes: Vec<HashSet<String>> = vec![HashSet::new()];
    for line in text.lines() {
        let line = line.trim();
        if line.starts_with('}') {
            scopes.pop().ok_or("unbalanced braces")?;
        }
        if line.starts_with("}, {") {
            scopes.push(HashSet::new());
        }
        let (defined, used) = match line.split_once(" = ") {
            Some((names, rest)) if names.starts_with('%') => (vec![names.split(':').next().unwrap()], rest),
            _ if line.starts_with("func.func") || line.starts_with("^bb0") => {
                (line.split(&['(', ' ', ':']).filter(|w| w.starts_with('%')).collect(), "")
            }
            _ => (vec![], line),
        };
        for name in
            used.split(|c: char| !c.is_ascii_alphanumeric() && c != '%').filter(|w| w.starts_with('%'))
        {
            if !scopes.iter().any(|s| s.contains(name)) {
                return Err(format!("{name} is not defined here: {line}"));
            }
        }
        let opens = line.ends_with('{') || line.ends_with("({");
        if line.starts_with("func.func") {
            scopes.push(HashSet::new());
        }
        for name in defined {
            if scopes.iter().any(|s| s.contains(name)) {
                return Err(format!("{name} is defined twice: {line}"));
            }
            scopes.last_mut().ok_or("no scope")?.insert(name.to_owned());
        }
        if opens && !line.starts_with("func.func") && !line.starts_with("}, {") {
            scopes.push(HashSet::new());
        }
    }
    if scopes.len() == 1 { Ok(()) } else { Err("unbalanced braces".into()) }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn fitting_programs_have_no_error(numbers in numbers()) {
        prop_assert!(built(&numbers, false).unwrap().verify().is_ok());
    }

    /// Nonsense ends in an error or in a module that verifies; never in a panic.
    #[test]
    fn nonsense_is_an_error(numbers in numbers()) {
        if let Ok(module) = built(&numbers, true) {
            prop_assert_eq!(module.verify(), Ok(()));
            prop_assert_eq!(check_names(&module.to_text()), Ok(()));
        }
    }

    #[test]
    fn text_is_well_scoped_and_repeatable(numbers in numbers()) {
        let module = built(&numbers, false).unwrap();
        let text = module.to_text();
        prop_assert_eq!(check_names(&text), Ok(()));
        prop_assert_eq!(&text, &module.to_text());
        prop_assert_eq!(text, built(&numbers, false).unwrap().to_text());
    }

    /// Ops that no output needs leave no trace.
    #[test]
    fn dead_code_is_not_printed(dead in numbers()) {
        let b = Builder::new();
        let x = b.param(TensorType::new(DType::F32, vec![2]));
        let y = b.exponential(x);
        let with = || {
            let b = Builder::new();
            let x = b.param(TensorType::new(DType::F32, vec![2]));
            let y = b.exponential(x);
            let mut c = Choices::new(&dead);
            // Parameters are never dropped, so the dead part may not add any.
            let _ = program_of(&b, &mut c, y);
            b.finish(&[y])
        };
        prop_assert_eq!(with().unwrap().to_text(), b.finish(&[y]).unwrap().to_text());
    }

    /// Slices have as many elements as counting them gives.
    #[test]
    fn slice_sizes_count(size in 0i64..20, start in 0i64..20, limit in 0i64..20, stride in 1i64..5) {
        let b = Builder::new();
        let x = b.param(TensorType::new(DType::F32, vec![size]));
        let got = b.slice(x, &[start], &[limit], &[stride]);
        if start <= limit && limit <= size {
            prop_assert_eq!(b.shape(got)[0], (start..limit).step_by(stride as usize).count() as i64);
            prop_assert_eq!(b.error(), None);
        } else {
            prop_assert!(b.error().is_some());
        }
    }

    /// Windows fit as often as trying every position says.
    #[test]
    fn window_counts_count(
        size in 0i64..12,
        (base, dilation, stride) in (1i64..4, 1i64..4, 1i64..4),
        (low, high) in (-4i64..5, -4i64..5),
        window in 1i64..6,
    ) {
        let b = Builder::new();
        let x = b.param(TensorType::new(DType::F32, vec![size]));
        let w = Window {
            strides: Dims::from_slice(&[stride]),
            base_dilations: Dims::from_slice(&[base]),
            window_dilations: Dims::from_slice(&[dilation]),
            padding: [(low, high)].into_iter().collect(),
            ..Window::new(&[window])
        };
        let got = b.reduce_window_with(Binary::Add, x, b.scalar_f64(DType::F32, 0.0), &w);
        let padded = if size == 0 { 0 } else { (size - 1) * base + 1 } + low + high;
        let last_tap = (window - 1) * dilation;
        let want = (0..padded.max(0)).step_by(stride as usize).filter(|p| p + last_tap < padded).count();
        prop_assert_eq!(b.shape(got)[0], want as i64);
        prop_assert_eq!(b.error(), None);
    }

    /// Broadcasting is commutative, and agrees with stretching dimension by dimension.
    #[test]
    fn broadcast_shapes_agree(a in prop::collection::vec(0i64..4, 0..4), c in prop::collection::vec(0i64..4, 0..4)) {
        let b = Builder::new();
        let x = b.param(TensorType::new(DType::F32, a.clone()));
        let y = b.param(TensorType::new(DType::F32, c.clone()));
        let (xy, yx) = (b.broadcast_shape(x, y), b.broadcast_shape(y, x));
        let at = |s: &[i64], i: usize| if i < s.len() { s[s.len() - 1 - i] } else { 1 };
        let rank = a.len().max(c.len());
        let fits = (0..rank).all(|i| at(&a, i) == at(&c, i) || at(&a, i) == 1 || at(&c, i) == 1);
        prop_assert_eq!(b.error().is_none(), fits);
        if fits {
            let want: Dims =
                (0..rank).rev().map(|i| if at(&a, i) == 1 { at(&c, i) } else { at(&a, i) }).collect();
            prop_assert_eq!(&xy, &want);
            prop_assert_eq!(&yx, &want);
            let (x, y) = b.broadcast_pair(x, y);
            prop_assert_eq!(b.shape(b.add(x, y)), want);
        }
    }

    /// A permutation and its inverse cancel in types, and the identity is folded away.
    #[test]
    fn transposes_cancel(perm in Just(vec![0i64, 1, 2, 3]).prop_shuffle()) {
        let b = Builder::new();
        let x = b.param(TensorType::new(DType::F32, vec![2, 3, 4, 5]));
        let mut inverse = [0i64; 4];
        for (i, &p) in perm.iter().enumerate() {
            inverse[p as usize] = i as i64;
        }
        prop_assert_eq!(b.ty(b.transpose(b.transpose(x, &perm), &inverse)), b.ty(x));
        prop_assert_eq!(b.transpose(x, &[0, 1, 2, 3]), x);
    }
}

/// Random ops on `x` alone.
fn program_of(b: &Builder, c: &mut Choices<'_>, x: Value) -> Vec<Value> {
    let mut pool = vec![x];
    for _ in 0..20 {
        let made = generate::step(b, c, &pool, false);
        pool.extend(made);
    }
    pool
}

/// After an error every value keeps the type of an operand; a complex one must not be converted for ever.
#[test]
fn complex_numbers_are_converted_after_an_error() {
    let b = Builder::new();
    let x = b.param(TensorType::new(DType::C64, vec![2]));
    b.transpose(x, &[5]);
    b.convert(x, DType::F32);
    assert!(b.finish(&[x]).is_err());
}
