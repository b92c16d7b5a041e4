//! `--fit remat`: which blocks to checkpoint, by trying it without a change to the script: `_remat.py` wraps them.

use anyhow::bail;

use crate::answer::{Judged, RematTry as Try, Rematted};
use crate::progress::say;
use crate::record::{Blocks, Policy};
use crate::session::{Session, Target, Variant};
use crate::verdict::Verdict;

/// In this order; the last one, which needs the memory of the host and the way to it, where no other fits.
const POLICIES: [Policy; 5] = [Policy::None, Policy::Products, Policy::Half, Policy::All, Policy::Offload];

impl Policy {
    /// What to write where a block is called.
    fn code(self) -> Option<&'static str> {
        match self {
            Policy::None => None,
            Policy::Products => Some(
                "x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=functools.partial(\
                 torch.utils.checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, \
                 torch.ops.aten.addmm.default, torch.ops.aten.bmm.default]))",
            ),
            Policy::Half => Some(
                "x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if i % 2 == 0 else block(x)",
            ),
            Policy::All => Some("x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)"),
            Policy::Offload => Some(
                "with torch.tpu.offload(): x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
            ),
        }
    }
}
/// Tries all policies on a slice; what is said of the cheapest that fits, else of the one that needs least.
pub(crate) fn search<'a>(session: &mut Session<'a>, target: Target<'a>) -> anyhow::Result<Judged> {
    let mut tries: Vec<Try> = Vec::new();
    let mut answers: Vec<Judged> = Vec::new();
    let mut found = Blocks::default();
    for policy in POLICIES {
        if policy == Policy::Offload && cheapest(&tries).is_some() {
            break;
        }
        say(&format!("checkpoints of {} on {}", policy.words(), target.slice.name));
        let variant = Variant { remat: Some(policy), ..Variant::default() };
        let (judged, told) = session.judge(target, &variant)?;
        if judged.interrupted || (policy == Policy::None && judged.verdict == Verdict::Unknown) {
            return Ok(judged);
        }
        found = told.blocks.unwrap_or_default();
        if found.blocks < 2 {
            bail!(
                "the script has no blocks to checkpoint: modules of one class, with parts of their own, in a \
                 torch.nn.ModuleList or Sequential"
            );
        }
        let product_flops = judged.step.as_ref().map(|s| s.work.product_flops);
        let base = tries.first().map_or(product_flops, |t| t.product_flops).filter(|f| *f > 0.0);
        tries.push(Try {
            policy,
            verdict: judged.verdict,
            reason: judged.reason.clone().filter(|_| judged.verdict == Verdict::Unknown),
            need_bytes: judged.need_bytes,
            product_flops,
            added: product_flops.zip(base).map(|(f, base)| f / base - 1.0),
            roofline_s: judged.step.as_ref().and_then(|s| s.work.roofline_s),
        });
        answers.push(judged);
    }
    let policy = cheapest(&tries);
    let least = |t: &&Try| t.need_bytes.unwrap_or(u64::MAX);
    let shown = policy.or_else(|| tries.iter().min_by_key(least).map(|t| t.policy));
    let at = tries.iter().position(|t| Some(t.policy) == shown).unwrap_or(0);
    let mut judged = answers.swap_remove(at);
    let code = policy.and_then(Policy::code);
    judged.remat = Some(Rematted { policy, code, blocks: found.blocks, classes: found.classes, tries });
    Ok(judged)
}

/// The one that fits with the fewest FLOPs, and of those the one that needs least memory.
fn cheapest(tries: &[Try]) -> Option<Policy> {
    let fits = tries.iter().filter(|t| t.verdict.status() == 0);
    let cost = |t: &Try| (t.product_flops.unwrap_or(f64::MAX), t.need_bytes.unwrap_or(u64::MAX));
    let order = |a: &&Try, b: &&Try| {
        let ((f, m), (g, n)) = (cost(a), cost(b));
        // Without checkpoints it is simplest.
        let simple = (b.policy == Policy::None).cmp(&(a.policy == Policy::None));
        f.total_cmp(&g).then(simple).then(m.cmp(&n))
    };
    fits.min_by(order).map(|t| t.policy)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attempt(policy: Policy, verdict: Verdict, flops: f64, need: u64) -> Try {
        let (need_bytes, product_flops) = (Some(need), Some(flops));
        Try { policy, verdict, reason: None, need_bytes, product_flops, added: None, roofline_s: None }
    }

    #[test]
    fn the_cheapest_that_fits_is_taken() {
        let tries = |verdicts: [Verdict; 5]| {
            [
                attempt(Policy::None, verdicts[0], 30.0, 90),
                attempt(Policy::Products, verdicts[1], 30.0, 60),
                attempt(Policy::Half, verdicts[2], 35.0, 50),
                attempt(Policy::All, verdicts[3], 40.0, 20),
                attempt(Policy::Offload, verdicts[4], 40.0, 10),
            ]
        };
        let (yes, no) = (Verdict::Fits, Verdict::DoesNotFit);
        for (verdicts, expected) in [
            ([yes, yes, yes, yes, yes], Some(Policy::None)),
            ([no, yes, yes, yes, yes], Some(Policy::Products)),
            ([no, Verdict::Unknown, no, Verdict::FitsBarely, no], Some(Policy::All)),
            ([no, no, no, no, yes], Some(Policy::Offload)),
            ([no, no, no, no, no], None),
        ] {
            assert_eq!(cheapest(&tries(verdicts)), expected);
        }
    }
}
