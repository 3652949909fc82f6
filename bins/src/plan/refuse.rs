//! Flags of the contract that this version reads but cannot do: each is refused by name.

use crate::cli::{DeviceArg, Switch, TrainArgs};
use crate::{Failure, Result};

/// Refuses what comes in a later version.
///
/// # Errors
/// A usage failure naming the first such flag and what to use instead.
pub(super) fn later_versions(args: &TrainArgs) -> Result<()> {
    let unbuilt = [
        (
            !args.eval_data.is_empty(),
            "--eval-data",
            "",
            "watch the training loss, or train with --lr 0 on the other rows",
        ),
        (args.eval_every.is_some(), "--eval-every", "", "leave it out: there is no evaluation yet"),
        (args.pack == Some(Switch::On), "--pack", " on", "--pack off; plain text is cut into full windows anyway"),
        (args.device == Some(DeviceArg::Cuda), "--device", " cuda", "--device cpu"),
    ];
    match unbuilt.into_iter().find(|(written, ..)| *written) {
        None => Ok(()),
        Some((_, flag, value, hint)) => {
            Err(Failure::usage(format!("{flag}{value} is not built yet; it comes in a later version"))
                .at(flag)
                .hint(hint))
        }
    }
}
