use oxitorch_aten::Schema;

fn check(text: &str, args: &[(&str, &str)], returns: &[&str]) {
    let s = Schema::parse(text).unwrap();
    let got: Vec<_> = s.args.iter().map(|a| (a.ty.as_str(), a.name.as_str())).collect();
    assert_eq!(got, args, "{text}");
    assert_eq!(s.returns.iter().map(|r| r.ty.as_str()).collect::<Vec<_>>(), returns, "{text}");
}

#[test]
fn types_lose_marks_and_lengths() {
    check(
        "aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor",
        &[("Tensor", "self"), ("Tensor", "other"), ("Scalar", "alpha")],
        &["Tensor"],
    );
    check(
        "split.Tensor(Tensor(a -> *) self, SymInt split_size, int dim=0) -> Tensor(a)[]",
        &[("Tensor", "self"), ("int", "split_size"), ("int", "dim")],
        &["Tensor[]"],
    );
    check(
        "x(int[2] stride=[1, 1], int[1]? dim=None, Tensor?[] i, str s=\"a,b\") -> (Tensor(a!) values, Tensor)",
        &[("int[]", "stride"), ("int[]?", "dim"), ("Tensor?[]", "i"), ("str", "s")],
        &["Tensor", "Tensor"],
    );
    check("_f_(Tensor(a!)[] self) -> ()", &[("Tensor[]", "self")], &[]);
}

#[test]
fn marks_and_defaults() {
    let s =
        Schema::parse("add.out(Tensor self, Tensor other, *, Scalar alpha=1, Tensor(a!) out) -> Tensor(a!)")
            .unwrap();
    assert_eq!(
        (s.base.as_str(), s.overload.as_str(), s.outs(), s.mutated()),
        ("add", "out", vec![3], vec![])
    );
    assert_eq!(s.args[2].default.as_deref(), Some("1"));
    let s =
        Schema::parse("add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)").unwrap();
    assert_eq!((s.outs(), s.mutated()), (vec![], vec![0]));
    assert!(Schema::parse("nonsense").is_err());
    assert!(Schema::parse("f(Tensor a").is_err());
}
