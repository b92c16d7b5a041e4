//! Advice that is followed, to see what comes of it: where a slice took little time, what would make its step smaller is
//! captured and compiled as well.

use std::time::{Duration, Instant};

use crate::answer::{Advice, Compiled, Judged};
use crate::compile::Asked;
use crate::hardware::Slice;
use crate::judge::advice;
use crate::progress::say;
use crate::record::{Policy, ScriptFacts};
use crate::session::{Session, Target, Variant};
use crate::split::Parallel;
use crate::verdict::Verdict;

/// Follows the advice for a slice, that which seems to save most first, for so long. Each try takes about as long as the
/// slice itself did.
pub(crate) fn check<'a>(
    session: &mut Session<'a>,
    target: Target<'a>,
    (judged, told): (&mut Judged, &ScriptFacts),
    time: Duration,
) -> anyhow::Result<()> {
    let Some(at) = judged.needed_at().filter(|_| !judged.interrupted) else { return Ok(()) };
    // What is compared is compiled alike: with little effort, unless all is to have full effort.
    let effort = if session.effort == Asked::Full { Asked::Full } else { Asked::Fast };
    let need = judged.programs.iter().filter_map(|p| p.fast_need_bytes.or(p.need_bytes)).max().unwrap_or(0);
    let start = Instant::now();
    let mut all = std::mem::take(&mut judged.programs[at].advice);
    for advice in &mut all {
        if start.elapsed() + judged.took > time {
            break;
        }
        let Some((slice, variant, parallel)) = followed(advice, target.slice, told)? else { continue };
        say(&format!("following advice for {}: {}", target.slice.name, advice.text));
        let target = Target { slice: &slice, ..target };
        let how = (effort, parallel.as_ref().or(session.parallel));
        // What is known already is worth more than this.
        let (tried, _) = match session.judge_so(target, &variant, how) {
            Ok(answer) => answer,
            Err(e) => {
                say(&format!("it could not be followed: {e:#}"));
                break;
            }
        };
        if tried.interrupted {
            judged.interrupted = true;
            break;
        }
        if let (Some(need_bytes), true) = (tried.need_bytes, tried.verdict != Verdict::Unknown) {
            let notes = tried.parallel.map(|p| p.notes).unwrap_or_default();
            advice.take(Compiled { need_bytes, verdict: tried.verdict, notes }, need);
        }
    }
    advice::rank(&mut all, need);
    judged.programs[at].advice = all;
    Ok(())
}

/// How the script is run and split to follow advice; none if nobody but its author can.
fn followed(
    advice: &Advice,
    slice: &Slice,
    told: &ScriptFacts,
) -> anyhow::Result<Option<(Slice, Variant, Option<Parallel>)>> {
    let so = |variant| Some((slice.clone(), variant, None));
    Ok(match advice.what {
        "checkpoint" if told.blocks.as_ref().is_some_and(|b| b.blocks > 1) => {
            so(Variant { remat: Some(Policy::All), ..Variant::default() })
        }
        "bfloat16" => so(Variant { autocast: true, ..Variant::default() }),
        "batch" => {
            let half = told.batch.map(|n| n / 2).filter(|n| *n > 0);
            half.and_then(|n| so(Variant { batch: Some((None, n)), ..Variant::default() }))
        }
        "shard" => match &advice.split {
            Some((name, parallel)) => Some((Slice::parse(name)?, Variant::default(), Some(parallel.clone()))),
            None => None,
        },
        _ => None,
    })
}
