//! What a lowering is for one platform, and for another.

use oxitorch_aten::case::Case;
use oxitorch_aten::{Builder, Config, DType, TargetOptions, TensorType, Value};

fn text(case: &str, config: &Config, operands: impl FnOnce(&Builder) -> Vec<Value>) -> String {
    Case::parse(case).unwrap().text_of(config, operands).unwrap()
}

fn f32s(b: &Builder, shape: &[i64]) -> Value {
    b.param(TensorType::new(DType::F32, shape))
}

#[test]
fn products_of_wide_integers_are_sums_where_there_are_none() {
    let of = |int64_as_pairs| {
        let target = TargetOptions { int64_as_pairs, ..TargetOptions::NONE };
        let config = Config { target, ..Config::default() };
        let case = Case::parse("bmm i64[2,3,4] i64[2,4,5]").unwrap();
        case.text(&config).unwrap()
    };
    assert!(of(false).contains("dot_general"));
    let text = of(true);
    assert!(!text.contains("dot_general") && text.contains("stablehlo.reduce"), "{text}");
    assert!(text.contains("-> (tensor<2x3x5xi64>)"), "{text}");
}

#[test]
fn products_of_bytes_over_no_multiple_of_four_are_of_wider_integers() {
    let text = |case: &str, int8_in_fours| {
        let target = TargetOptions { int8_in_fours, ..TargetOptions::NONE };
        Case::parse(case).unwrap().text(&Config { target, ..Config::default() }).unwrap()
    };
    for (case, wide) in [
        ("mm i8[2,3] i8[3,4]", true),
        ("mm i8[2,8] i8[8,3]", false),
        ("bmm i8[5,2,33] i8[5,33,4]", true),
        ("dot i8[7] i8[7]", true),
        ("_int_mm i8[20,30] i8[30,8]", true),
        ("_int_mm i8[20,32] i8[32,8]", false),
        ("mm u8[2,3] u8[3,4]", false),
    ] {
        let of_int32 = |on| {
            let text = text(case, on);
            let product = text.lines().find(|l| l.contains("dot_general")).unwrap();
            product.rsplit(" : (").next().unwrap().split(") ->").next().unwrap().matches("i32").count() == 2
        };
        assert_eq!((of_int32(false), of_int32(true)), (false, wide), "{case}\n{}", text(case, true));
    }
}

#[test]
fn products_are_rounded_by_a_library_that_can() {
    let text = |case: &str, dots_in_16_bits| {
        let config =
            Config { target: TargetOptions { dots_in_16_bits, ..TargetOptions::NONE }, ..Config::default() };
        Case::parse(case).unwrap().text(&config).unwrap()
    };
    for (case, rounded) in [
        ("mm bf16[2,3] bf16[3,4]", true),
        ("bmm f16[5,2,3] f16[5,3,4]", true),
        ("addmm bf16[4] bf16[2,3] bf16[3,4] 1 1", true),
        ("mm.dtype bf16[2,3] bf16[3,4] float32", false),
        ("mm f32[2,3] f32[3,4]", false),
    ] {
        let wide = |on| text(case, on).contains("f32");
        assert_eq!((wide(false), wide(true)), (true, !rounded), "{case}\n{}", text(case, true));
    }
}

#[test]
fn products_are_called_for_where_a_transposed_matrix_takes_long() {
    let target = TargetOptions { library: true, own_products: true, ..TargetOptions::NONE };
    let config = Config { target, ..Config::default() };
    let is_call = |rows: i64, k: i64, n: i64, transposed: bool| {
        let made = text(&format!("mm f32[{rows},{k}] f32[{k},{n}]"), &config, |b| {
            let w = if transposed { b.transpose(f32s(b, &[n, k]), &[1, 0]) } else { f32s(b, &[k, n]) };
            vec![f32s(b, &[rows, k]), w]
        });
        made.contains("custom_call")
    };
    assert!(is_call(2, 500, 500, true), "few rows");
    assert!(is_call(128, 2048, 500, true), "a large matrix");
    assert!(is_call(128, 512, 512, true), "columns that push each other out of the cache");
    for (rows, k, n, transposed) in
        [(128, 512, 512, false), (128, 500, 500, true), (4096, 512, 512, true), (128, 512, 64, true)]
    {
        assert!(!is_call(rows, k, n, transposed), "{rows} {k} {n} {transposed}");
    }
}

#[test]
fn tokens_are_rows_only_where_folding_costs_nothing() {
    let of = |keep_row_dims| {
        let config =
            Config { target: TargetOptions { keep_row_dims, ..TargetOptions::NONE }, ..Config::default() };
        text("addmm f32[7] f32[6,5] f32[5,7] none none", &config, |b| {
            let x = b.reshape(f32s(b, &[2, 3, 5]), &[6, 5]);
            vec![f32s(b, &[7]), x, f32s(b, &[5, 7])]
        })
    };
    let (folded, unfolded) = (of(false), of(true));
    assert!(folded.contains("(tensor<6x5xf32>, tensor<5x7xf32>) -> tensor<6x7xf32>"), "{folded}");
    assert!(unfolded.contains("(tensor<2x3x5xf32>, tensor<5x7xf32>) -> tensor<2x3x7xf32>"), "{unfolded}");
    assert!(unfolded.contains("stablehlo.reshape") && !unfolded.contains("tensor<6x5xf32>"), "{unfolded}");
}

#[test]
fn a_gradient_of_weights_sums_over_unfolded_rows() {
    let config =
        Config { target: TargetOptions { keep_row_dims: true, ..TargetOptions::NONE }, ..Config::default() };
    let of = |rows: &[i64]| {
        text("mm f32[4,6] f32[6,5]", &config, |b| {
            let grad = b.reshape(f32s(b, &[2, 3, 4]), &[6, 4]);
            let shape = [rows, &[5]].concat();
            vec![b.transpose(grad, &[1, 0]), b.reshape(f32s(b, &shape), &[6, 5])]
        })
    };
    let text = of(&[2, 3]);
    assert!(text.contains("contracting_dims = [0, 1] x [0, 1]"), "{text}");
    assert!(text.contains("(tensor<2x3x4xf32>, tensor<2x3x5xf32>) -> tensor<4x5xf32>"), "{text}");
    let other = of(&[3, 2]);
    assert!(other.contains("(tensor<4x6xf32>, tensor<6x5xf32>)"), "{other}");
}

#[test]
fn products_may_be_rounded_by_who_adds_them_up() {
    let of = |case: &str, bf16_dot_results| {
        let config =
            Config { target: TargetOptions { bf16_dot_results, ..TargetOptions::NONE }, ..Config::default() };
        Case::parse(case).unwrap().text(&config).unwrap()
    };
    let mm = "mm bf16[2,3] bf16[3,4]";
    assert!(of(mm, false).contains("tensor<2x4xf32>") && !of(mm, true).contains("tensor<2x4xf32>"));
    // What is added to it is added before.
    assert!(of("addmm bf16[4] bf16[2,3] bf16[3,4] none none", true).contains("-> tensor<2x4xf32>"));
}

#[test]
fn scores_of_the_backward_are_not_those_of_the_forward() {
    let case = "_scaled_dot_product_fused_attention_overrideable_backward f32[2,3,5,6] f32[2,3,5,4] f32[2,3,7,4] \
                f32[2,3,7,6] none [true,true,true,false] f32[2,3,5,6] f32[2,3,5]@pos i32[0] i32[0] 0 0 0.0 false \
                i64[] i64[] none";
    let of = |recompute_scores| {
        let config =
            Config { target: TargetOptions { recompute_scores, ..TargetOptions::NONE }, ..Config::default() };
        Case::parse(case).unwrap().text(&config).unwrap()
    };
    assert!(of(true).contains("stablehlo.optimization_barrier") && !of(false).contains("barrier"));
}

#[test]
fn rows_that_are_masked_need_not_be_in_memory() {
    let case = "nll_loss_forward f32[2,3] i64[2]@<3 none 1 -100";
    let text = |gather_by_mask| {
        let config =
            Config { target: TargetOptions { gather_by_mask, ..TargetOptions::NONE }, ..Config::default() };
        Case::parse(case).unwrap().text(&config).unwrap()
    };
    assert!(text(false).contains("stablehlo.gather"));
    let masked = text(true);
    assert!(!masked.contains("stablehlo.gather") && masked.contains("stablehlo.select"), "{masked}");
}

#[test]
fn logarithms_that_fuse_are_made_from_the_input() {
    let text = |gather_by_mask| {
        let config =
            Config { target: TargetOptions { gather_by_mask, ..TargetOptions::NONE }, ..Config::default() };
        Case::parse("_log_softmax f32[2,3] 1 false").unwrap().text(&config).unwrap()
    };
    let count = |text: &str| text.matches("stablehlo.subtract").count();
    assert_eq!((count(&text(false)), count(&text(true))), (2, 3));
    assert!(text(true).contains("stablehlo.optimization_barrier"));
}
