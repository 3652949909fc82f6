//! The command line: what parses, what is refused, and what the help says.

use super::*;
use crate::plan::{defaults, preset};
use clap::CommandFactory;

fn train(line: &str) -> TrainArgs {
    let line = format!("umbra train {line}");
    match parse(line.split_whitespace()).unwrap_or_else(|e| panic!("{line}: {}", e.text())).command {
        Command::Train(args) => *args,
        other => panic!("{other:?}"),
    }
}

fn outcome(line: &str) -> ClapOutcome {
    parse(line.split_whitespace()).unwrap_err()
}

/// The long help of `umbra train`, on one line.
fn train_help() -> String {
    outcome("umbra train --help").text().split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn the_definition_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn every_flag_of_the_contract_parses() {
    let args = train(
        "--model DIR --data a.jsonl b.txt --config ds.json fsdp.yaml --policy low-sr --stage 2 --shard-group 4 --lanes 8 \
         --allow-different-bits --steps 7 --epochs 2.5 --lr 3e-4 --min-lr 1e-6 --schedule wsd --warmup-steps 5 \
         --warmup-ratio 0.1 --decay-steps 2 --micro-batch 3 --accum 4 --global-batch 24 --seq-len 64 --clip 0.5 \
         --weight-decay 0.1 --decay-norms --beta1 0.8 --beta2 0.95 --eps 1e-6 --seed 11 --recompute block \
         --reshard-after-forward off --threads 2 --device cuda --no-shuffle --pack on --eval-data e.jsonl --eval-every 9 \
         --log-every 10 --save-every 50 --keep 3 --resume never --override lr seed --hash-every 6 --dump D \
         --save-failure continue --checkpoint-files per-rank --tensorboard --out O",
    );
    assert_eq!(args.model.as_deref(), Some("DIR".as_ref()));
    assert_eq!(args.data, [PathBuf::from("a.jsonl"), "b.txt".into()]);
    assert_eq!(args.config, [PathBuf::from("ds.json"), "fsdp.yaml".into()]);
    assert_eq!(args.policy, Some(Policy::LowSr));
    assert_eq!((args.stage, args.shard_group, args.lanes), (Some(2), Some(4), Some(8)));
    assert_eq!((args.steps, args.epochs), (Some(7), Some(2.5)));
    assert_eq!((args.lr, args.min_lr, args.schedule), (Some(3e-4), Some(1e-6), Some(ScheduleKind::Wsd)));
    assert_eq!((args.warmup_steps, args.warmup_ratio, args.decay_steps), (Some(5), Some(0.1), Some(2)));
    assert_eq!((args.micro_batch, args.accum, args.global_batch), (Some(3), Some(4), Some(24)));
    assert_eq!((args.seq_len, args.clip, args.weight_decay), (Some(64), Some(0.5), Some(0.1)));
    assert_eq!((args.beta1, args.beta2, args.eps, args.seed), (Some(0.8), Some(0.95), Some(1e-6), Some(11)));
    assert_eq!((args.recompute, args.reshard_after_forward), (Some(Recompute::Block), Some(Switch::Off)));
    assert_eq!((args.threads, args.device, args.pack), (Some(2), Some(DeviceArg::Cuda), Some(Switch::On)));
    assert_eq!((args.eval_every, args.log_every, args.save_every), (Some(9), Some(10), Some(50)));
    assert_eq!((args.keep, args.resume, args.hash_every), (Some(3), Some(ResumeArg::Never), Some(6)));
    assert_eq!(args.eval_data, [PathBuf::from("e.jsonl")]);
    assert_eq!(args.overrides, ["lr", "seed"]);
    assert_eq!(args.save_failure, Some(SaveFailure::Continue));
    assert_eq!(args.checkpoint_files, Some(CheckpointFiles::PerRank));
    assert_eq!((args.dump, args.out), (Some("D".into()), Some("O".into())));
    assert!(args.allow_different_bits && args.decay_norms && args.no_shuffle && args.tensorboard);
}

#[test]
fn nothing_written_leaves_everything_open() {
    let args = train("");
    assert!(args.model.is_none() && args.data.is_empty() && args.lr.is_none() && args.steps.is_none());
    assert!(!args.no_shuffle && !args.decay_norms && !args.tensorboard);
}

#[test]
fn hugging_face_spellings_mean_the_same() {
    let hf = train(
        "--learning-rate 1e-4 --per_device_train_batch_size 2 --gradient-accumulation-steps=8 --max_grad_norm=0.3 \
         --num-train-epochs 3 --lr_scheduler_type constant_with_warmup --adam_beta1 0.85 --adam-beta2 0.9 \
         --adam_epsilon 1e-7 --output_dir my_runs --model_name_or_path my_model --resume_from_checkpoint my_dir",
    );
    assert_eq!((hf.lr, hf.micro_batch, hf.accum, hf.clip), (Some(1e-4), Some(2), Some(8), Some(0.3)));
    assert_eq!((hf.epochs, hf.schedule), (Some(3.0), Some(ScheduleKind::Constant)));
    assert_eq!((hf.beta1, hf.beta2, hf.eps), (Some(0.85), Some(0.9), Some(1e-7)));
    let hf = train(
        "--resume_from_checkpoint my_dir --output_dir my_runs --model_name_or_path my_model --save_steps 5 --save_total_limit 4",
    );
    assert_eq!((hf.save_every, hf.keep), (Some(5), Some(4)));
    // Values keep their underscores.
    assert_eq!((hf.out, hf.model), (Some("my_runs".into()), Some("my_model".into())));
    assert_eq!(hf.resume, Some(ResumeArg::Dir("my_dir".into())));
}

#[test]
fn numbers_that_mean_nothing_still_parse_so_that_the_plan_can_say_why() {
    assert_eq!(train("--lr -1").lr, Some(-1.0));
    assert_eq!(train("--lr -1e-5 --clip=-inf").lr, Some(-1e-5));
    assert!(train("--lr nan").lr.is_some_and(f64::is_nan));
    assert_eq!(train("--accum 0").accum, Some(0));
}

#[test]
fn help_and_version_exit_0_and_mistakes_exit_2() {
    for line in
        ["umbra --help", "umbra --version", "umbra train --help", "umbra plan --help", "umbra bench step --help"]
    {
        assert_eq!(outcome(line).exit_code(), 0, "{line}");
    }
    for line in [
        "umbra",
        "umbra tain",
        "umbra train --lrr 1",
        "umbra train --steps many",
        "umbra bench",
        "umbra generate",
        "umbra report",
    ] {
        assert_eq!(outcome(line).exit_code(), 2, "{line}");
    }
    assert!(outcome("umbra train --policy fsdp").text().contains("fsdp-mixed"));
    assert!(outcome("umbra train --lrr 1").text().contains("--lr"));
}

#[test]
fn what_is_not_built_is_refused_by_name() {
    let cases = [
        ("data check rows.jsonl", "data"),
        ("doctor", "doctor"),
        ("bench kernels --fast", "bench kernels"),
        ("bench collectives", "bench collectives"),
    ];
    for (line, name) in cases {
        let cli = parse(format!("umbra {line}").split_whitespace()).unwrap_or_else(|e| panic!("{line}: {}", e.text()));
        let failure = cli.command.not_built().unwrap();
        assert_eq!(failure.exit, crate::Exit::Usage);
        assert!(failure.what.starts_with(&format!("`umbra {name}` is not built yet")), "{}", failure.what);
    }
    for line in [
        "umbra train",
        "umbra generate --model tiny",
        "umbra report umbra-out",
        "umbra checkpoint verify DIR",
        "umbra plan --model DIR --lr 1e-5",
        "umbra compare --policies shadow,fsdp-low",
        "umbra config diff A B",
        "umbra bench step",
    ] {
        assert!(parse(line.split_whitespace()).unwrap().command.not_built().is_none(), "{line}");
    }
}

#[test]
fn help_states_the_defaults_that_the_plan_uses() {
    let help = train_help();
    let stated = [
        ("--policy", defaults::POLICY.to_string()),
        ("--schedule", defaults::SCHEDULE.to_string()),
        ("--schedule-stepping", possible(defaults::SCHEDULE_STEPPING)),
        ("--optimizer", possible(defaults::OPTIMIZER)),
        ("--momentum", defaults::MOMENTUM.to_string()),
        ("--lr", format!("{:e}", defaults::LR)),
        ("--beta1", defaults::BETA1.to_string()),
        ("--beta2", defaults::BETA2.to_string()),
        ("--eps", format!("{:e}", defaults::EPS)),
        ("--clip", defaults::CLIP.to_string()),
        ("--epochs", defaults::EPOCHS.to_string()),
        ("--seq-len", format!("{}, or the model's limit if smaller", defaults::SEQ_LEN)),
        ("--out", defaults::OUT.to_owned()),
        ("--stage", defaults::STAGE.to_string()),
        ("--keep", defaults::KEEP.to_string()),
        ("--save-failure", possible(defaults::SAVE_FAILURE)),
        ("--checkpoint-files", possible(defaults::CHECKPOINT_FILES)),
    ];
    for (flag, value) in stated {
        let rest = &help[help.find(&format!("{flag} <")).unwrap_or_else(|| panic!("{flag} is not in the help"))..];
        let default = rest.split("[default: ").nth(1).and_then(|s| s.split(']').next()).unwrap();
        assert_eq!(default, value, "{flag}");
    }
}

/// A value as the command line spells it.
fn possible(value: impl clap::ValueEnum) -> String {
    value.to_possible_value().unwrap().get_name().to_owned()
}

#[test]
fn help_calls_unbuilt_what_the_plan_refuses() {
    let command = TrainArgs::augment_args(clap::Command::new("train"));
    let help = |arg: &clap::Arg| arg.get_help().unwrap().to_string();
    let unbuilt = command.get_arguments().filter(|arg| help(arg).contains("not built yet"));
    let unbuilt: Vec<&str> = unbuilt.filter_map(clap::Arg::get_long).collect();
    assert_eq!(unbuilt, ["eval-data", "eval-every", "device"]);
}

#[test]
fn a_flag_sets_one_field_however_it_is_spelled() {
    for (flag, field) in
        [("lr", "lr"), ("learning-rate", "lr"), ("max-seq-length", "seq_len"), ("override", "overrides")]
    {
        assert_eq!(TrainArgs::field_of(flag).as_deref(), Some(field));
    }
    assert_eq!(TrainArgs::field_of("lrr"), None);
}

#[test]
fn help_teaches() {
    let help = train_help();
    for policy in Policy::ALL {
        assert!(help.contains(&format!("{policy}: {}", policy.about())), "{policy}");
    }
    for heading in [
        "Model and data:",
        "Batch and length:",
        "Optimizer:",
        "Schedule:",
        "Precision:",
        "Layout:",
        "Output:",
        "Checkpoints:",
    ] {
        assert!(help.contains(heading), "{heading}");
    }
    for example in [
        "umbra train Alone:",
        "mpirun -n 4 umbra train",
        "--model DIR --data train.jsonl",
        "mpirun -n 2 umbra train --data train.jsonl --steps 1000 --lanes 8",
        "--resume umbra-out/checkpoints/step-000100",
    ] {
        assert!(help.contains(example), "{example}");
    }
    // The preset is described as taking under a minute; its length is not repeated in the help.
    assert!(help.contains("under a minute") && preset::STEPS > 0);
}

#[test]
fn generate_reads_and_checks_its_numbers() {
    let args = |line: &str| match parse(format!("umbra generate --model m {line}").split_whitespace()).unwrap().command
    {
        Command::Generate(args) => args,
        other => panic!("{other:?}"),
    };
    let given = args("--prompt Hi --max-new-tokens 5 --temperature 0.8 --top-p 0.9 --seed 3 --threads 2");
    assert_eq!((given.prompt.as_deref(), given.max_new_tokens), (Some("Hi"), 5));
    assert_eq!((given.temperature, given.top_p, given.seed, given.threads), (0.8, 0.9, 3, Some(2)));
    assert!(given.check().is_ok());
    let open = args("");
    assert_eq!((open.prompt, open.max_new_tokens, open.temperature, open.top_p), (None, 64, 0.0, 1.0));
    for bad in ["--temperature -1", "--temperature nan", "--top-p 0", "--top-p 1.5", "--threads 0"] {
        let flag = bad.split(' ').next().unwrap();
        assert_eq!(args(bad).check().unwrap_err().place.as_deref(), Some(flag));
    }
}

#[test]
fn report_takes_runs_and_a_picture() {
    let args = |line: &str| match parse(format!("umbra report {line}").split_whitespace()).unwrap().command {
        Command::Report(args) => args,
        other => panic!("{other:?}"),
    };
    let given = args("a b/c --svg loss.svg");
    assert_eq!(given.runs, [PathBuf::from("a"), "b/c".into()]);
    assert_eq!(given.svg, Some("loss.svg".into()));
    assert_eq!(args("a").svg, None);
    assert!(outcome("umbra report a --html b").text().contains("--html"));
}

#[test]
fn checkpoint_commands_take_folders() {
    let args = |line: &str| match parse(format!("umbra checkpoint {line}").split_whitespace()).unwrap().command {
        Command::Checkpoint(args) => args.what,
        other => panic!("{other:?}"),
    };
    let Checkpoint::Inspect(inspect) = args("inspect a --tensors --json") else { panic!("inspect") };
    assert_eq!((inspect.dir, inspect.tensors, inspect.json), ("a".into(), true, true));
    let Checkpoint::Verify(verify) = args("verify a/b") else { panic!("verify") };
    assert_eq!(verify.dir, PathBuf::from("a/b"));
    let Checkpoint::Diff(diff) = args("diff a b") else { panic!("diff") };
    assert_eq!((diff.a, diff.b), ("a".into(), "b".into()));
    for (written, dtype) in [
        ("", ExportDType::Bf16),
        ("--dtype bf16", ExportDType::Bf16),
        ("--dtype fp32", ExportDType::Fp32),
        ("--dtype float32", ExportDType::Fp32),
        ("--dtype source", ExportDType::Source),
    ] {
        let Checkpoint::Export(export) = args(&format!("export a --out b {written}")) else { panic!("export") };
        assert_eq!((export.dir, export.out, export.dtype), ("a".into(), "b".into(), dtype));
    }
    for line in ["", " inspect", " verify", " diff a", " export a", " export a --out b --dtype fp16"] {
        assert_eq!(outcome(&format!("umbra checkpoint{line}")).exit_code(), 2, "{line}");
    }
    for what in ["inspect", "verify", "diff", "export"] {
        let help = outcome(&format!("umbra checkpoint {what} --help"));
        assert_eq!(help.exit_code(), 0);
        assert!(help.text().contains(&format!("  umbra checkpoint {what} ")), "an example of {what}");
    }
}

#[test]
fn bench_step_has_defaults_and_checks() {
    let args = |line: &str| match parse(format!("umbra bench step {line}").split_whitespace()).unwrap().command {
        Command::Bench(BenchArgs { what: Bench::Step(args) }) => args,
        other => panic!("{other:?}"),
    };
    let open = args("");
    assert_eq!((open.steps, open.seq_len, open.micro_batch, open.policy), (10, 512, 2, Policy::Shadow));
    assert_eq!(args("--policy fp32 --steps 3").policy, Policy::Fp32);
    assert!(args("--steps 1").check().is_ok());
    for bad in ["--steps 0", "--seq-len 1", "--micro-batch 0", "--threads 0"] {
        assert_eq!(args(bad).check().unwrap_err().exit, crate::Exit::Usage, "{bad}");
    }
}
