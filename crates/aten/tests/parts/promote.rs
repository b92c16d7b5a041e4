use oxitorch_aten::DType;
use oxitorch_aten::promote::ResultType;

fn check(operands: &[(usize, DType, bool)], want: DType) {
    let mut state = ResultType::default();
    for &(rank, dtype, wrapped) in operands {
        state.add(rank, dtype, wrapped, DType::F32).unwrap();
    }
    assert_eq!(state.get().unwrap(), Some(want), "{operands:?}");
}

#[test]
fn dimensions_outrank_zero_dim_outranks_numbers() {
    use DType::*;
    check(&[(1, S32, false), (0, S64, false)], S32);
    check(&[(1, S32, false), (0, F16, false)], F16);
    check(&[(1, BF16, false), (0, F64, true)], BF16);
    check(&[(1, S64, false), (0, F64, true)], F32);
    check(&[(0, F16, false), (0, F64, true)], F16);
    check(&[(1, Pred, false), (0, S64, true)], S64);
    check(&[(1, F64, false), (0, C128, true)], C128);
    check(&[(1, BF16, false), (0, C128, true)], C64);
    check(&[(1, U8, false), (0, S64, true)], U8);
    check(&[(1, U8, false), (2, S8, false)], S16);
    check(&[(1, F16, false), (2, BF16, false)], F32);
    check(&[(0, S64, true), (0, F64, true)], F32);
}
