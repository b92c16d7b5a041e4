use oxitorch_aten::TargetOptions;

#[test]
fn either_of_two() {
    let both = TargetOptions::TPU.union(TargetOptions::CPU);
    assert!(both.gather_by_mask && both.fence_bf16_dots && !both.dots_in_16_bits && !both.library);
}
