use oxitorch_aten::DType;
use oxitorch_aten::args::Number;
use oxitorch_aten::numbers::{fits, show};

#[test]
fn as_streams_print() {
    let check = |x, want| assert_eq!(show(x), want);
    check(3.0, "3");
    check(-0.5, "-0.5");
    check(0.1 + 0.2, "0.3");
    check(123_456.7, "123457");
    check(f64::from(f32::MAX), "3.40282e+38");
    check(1e-5, "1e-05");
    check(f64::NAN, "nan");
    check(f64::INFINITY, "inf");
}

#[test]
fn what_fits() {
    let check = |n, dtype, want: bool| assert_eq!(fits(n, dtype).is_ok(), want, "{n:?} {dtype:?}");
    check(Number::Int(127), DType::S8, true);
    check(Number::Int(128), DType::S8, false);
    check(Number::Int(-1), DType::U8, true);
    check(Number::Int(-256), DType::U8, false);
    check(Number::Float(-1.0), DType::U8, false);
    check(Number::Float(f64::NAN), DType::S64, false);
    check(Number::Float(1e39), DType::F32, false);
    check(Number::Float(f64::INFINITY), DType::F16, true);
    check(Number::Int(100_000), DType::F16, false);
    check(Number::Complex(1.0, 0.0), DType::F32, true);
    check(Number::Complex(1.0, 2.0), DType::F32, false);
    check(Number::Int(1000), DType::Pred, true);
}
