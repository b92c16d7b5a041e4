//! Loops, branches, random numbers and custom calls.

use super::*;

pub(super) fn while_(s: &Sig<'_>) -> Result {
    same_len(s.regions.len(), 2, "regions")?;
    for region in s.regions {
        let fits = region.args.iter().eq(s.operands.iter().copied());
        ensure!(fits, "condition and body must take the loop's values");
    }
    predicate(&s.regions[0], "the condition")?;
    let body = &s.regions[1].returns;
    ensure!(
        body.iter().eq(s.operands.iter().copied()),
        "the body returns ({}), expected the loop's types",
        list(body)
    );
    Ok(s.operands.iter().map(|&t| t.clone()).collect())
}

pub(super) fn branches(s: &Sig<'_>, selector: DType, at_least: usize) -> Result {
    ensure!(*s.operands[0] == TensorType::scalar(selector), "the selector must be a tensor<{selector}>");
    ensure!(s.regions.len() >= at_least, "needs at least {at_least} branches");
    let first = &s.regions[0].returns;
    for (i, region) in s.regions.iter().enumerate() {
        ensure!(region.args.is_empty(), "branches take no arguments");
        ensure!(
            region.returns == *first,
            "branch {i} returns ({}), branch 0 ({})",
            list(&region.returns),
            list(first)
        );
    }
    Ok(first.iter().cloned().collect())
}

pub(super) fn rng_bit_generator(state: &TensorType, want: &TensorType, algorithm: RngAlgorithm) -> Result {
    ensure!(state.dtype == DType::U64 && state.rank() == 1, "the state must be a vector of ui64");
    let n = state.shape[0];
    let fits = match algorithm {
        RngAlgorithm::Default => true,
        RngAlgorithm::ThreeFry => n == 2,
        RngAlgorithm::Philox => n == 2 || n == 3,
    };
    ensure!(fits, "{} does not work with a state of {n} words", algorithm.name());
    ensure!(DTypeSet::UNSIGNED.has(want.dtype), "generates unsigned integers, not {}", want.dtype);
    Ok(smallvec![state.clone(), want.clone()])
}

pub(super) fn custom_call(s: &Sig<'_>, call: &CustomCall) -> Result {
    ensure!(!call.target.is_empty(), "needs a target name");
    for &(output, operand) in &call.output_operand_aliases {
        let (Some(r), Some(&o)) = (s.requested.get(output as usize), s.operands.get(operand as usize)) else {
            let reason = format!("alias of output {output} and operand {operand} is out of range");
            return Err(Broken::Other(reason));
        };
        ensure!(r == o, "output {output} cannot share the buffer of operand {operand}: types differ");
    }
    Ok(s.requested.iter().cloned().collect())
}
