//! Flags of the contract that this version reads but cannot do: each is refused by name.

use super::defaults;
use crate::cli::{DeviceArg, Recompute, ResumeArg, Switch, TrainArgs};
use crate::{Failure, Result};

/// A refusal: the flag as written, and what to use instead.
fn later(flag: &str, written: &str, hint: &str) -> Failure {
    Failure::usage(format!("{written} is not built yet; it comes in a later version")).at(flag).hint(hint)
}

/// Refuses what comes in a later version.
///
/// # Errors
/// A usage failure naming the first such flag and what to use instead.
pub(super) fn later_versions(args: &TrainArgs, world: usize) -> Result<()> {
    layout(args, world)?;
    let unbuilt = [
        (!args.config.is_empty(), "--config", "write the settings as flags"),
        (!args.overrides.is_empty(), "--override", "leave it out: without --config there is nothing to override"),
        (!args.eval_data.is_empty(), "--eval-data", "watch the training loss, or train with --lr 0 on the other rows"),
        (args.eval_every.is_some(), "--eval-every", "leave it out: there is no evaluation yet"),
        (args.save_every.is_some(), "--save-every", "leave it out: the model is saved at the end, in OUT/model"),
        (args.hash_every.is_some(), "--hash-every", "compare the files of OUT/model after the run"),
        (args.tensorboard, "--tensorboard", "read OUT/metrics.jsonl, one JSON object a step"),
    ];
    for (written, flag, hint) in unbuilt {
        if written {
            return Err(later(flag, flag, hint));
        }
    }
    if let Some(keep) = args.keep.filter(|&keep| keep != defaults::KEEP) {
        return Err(later("--keep", &format!("--keep {keep}"), "leave it out: there are no checkpoints to keep yet"));
    }
    if let Some(ResumeArg::Dir(dir)) = &args.resume {
        let hint = "--model OUT/model starts from a finished run's weights, with a fresh optimizer";
        return Err(later("--resume", &format!("--resume {}", dir.display()), hint));
    }
    if args.pack == Some(Switch::On) {
        return Err(later("--pack", "--pack on", "--pack off; plain text is cut into full windows anyway"));
    }
    Ok(())
}

/// Refuses layouts other than ZeRO-3 over all ranks on the CPU.
fn layout(args: &TrainArgs, world: usize) -> Result<()> {
    if let Some(stage) = args.stage.filter(|&stage| stage != 3) {
        if stage > 3 {
            return Err(crate::cli::bad_value("--stage", "0, 1, 2 or 3", stage));
        }
        let hint = "--stage 3: it gives the same result and needs the least memory";
        return Err(later("--stage", &format!("--stage {stage}"), hint));
    }
    for (flag, value) in [("--lanes", args.lanes), ("--shard-group", args.shard_group)] {
        crate::cli::at_least_one(flag, value)?;
        if let Some(n) = value.filter(|&n| n != world) {
            let hint = format!("leave it out, or start {n} ranks; this run has {world}");
            return Err(later(flag, &format!("{flag} {n} on {world} rank(s)"), &hint));
        }
    }
    if args.allow_different_bits {
        let hint = "leave it out: every layout of this version keeps the bits";
        return Err(later("--allow-different-bits", "--allow-different-bits", hint));
    }
    if args.recompute == Some(Recompute::Block) {
        return Err(later("--recompute", "--recompute block", "--recompute none with a smaller --micro-batch"));
    }
    if args.reshard_after_forward == Some(Switch::Off) {
        return Err(later("--reshard-after-forward", "--reshard-after-forward off", "--reshard-after-forward on"));
    }
    if args.device == Some(DeviceArg::Cuda) {
        return Err(later("--device", "--device cuda", "--device cpu"));
    }
    Ok(())
}
