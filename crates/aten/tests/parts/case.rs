use oxitorch_aten::args::Number;
use oxitorch_aten::case::{Case, number};
use oxitorch_aten::{Arg, DType};

#[test]
fn tokens() {
    let case = Case::parse("add.Tensor f32[2,3] ~1.5 2").unwrap();
    assert_eq!(case.operands.len(), 3);
    assert!(matches!(&case.args[1], Arg::Tensor(t) if t.wrapped && t.ty.dtype == DType::F64));
    assert!(matches!(Case::parse("add.Tensor f32[] i64[]@<5 1").unwrap().args[2], Arg::None));
    assert!(Case::parse("add.Tensor f32[2").is_err());
    assert!(Case::parse("no.such f32[2]").is_err());
    assert_eq!(number("-1.5-2j"), Ok(Number::Complex(-1.5, -2.0)));
    assert_eq!(number("2j"), Ok(Number::Complex(0.0, 2.0)));
}
