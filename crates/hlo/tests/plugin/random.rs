use oxitorch_hlo::*;
use proptest::prelude::*;

use crate::common::*;
use crate::generate::{Choices, program};

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever the builder accepts, the plugin compiles, and its results have the inferred types.
    #[test]
    fn accepted_programs_run(numbers in prop::collection::vec(any::<u16>(), 10..150)) {
        let b = Builder::new();
        let outputs = program(&b, &mut Choices::new(&numbers), false);
        prop_assert_eq!(b.error(), None);
        let module = b.finish(&outputs).unwrap();
        let inputs: Vec<Host> = module.param_types().map(|t| zeros(t.dtype, &t.shape)).collect();
        let result = try_run_with(&module, &inputs, &quick());
        prop_assert!(result.is_ok(), "{}", result.unwrap_err());
    }
}
