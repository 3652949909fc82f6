//! A refusal as the user sees it.

use umbra_tests::{Output, command, run};

pub(crate) fn strings(args: &[&str]) -> Vec<String> {
    args.iter().map(|a| (*a).to_owned()).collect()
}

/// The numbers of ranks a command line is tried on. A failing job under mpirun takes over a second, because mpirun waits for
/// the other ranks, so what takes the same way through the program as another case is tried alone.
pub(crate) const BOTH: &[usize] = &[1, 2];
pub(crate) const ALONE: &[usize] = &[1];

/// [`BOTH`] for the first case of a table, [`ALONE`] for the others.
pub(crate) fn ranks_of(case: usize) -> &'static [usize] {
    if case == 0 { BOTH } else { ALONE }
}

/// The command line `args` ends with code `exit` and one message of one screen in which everything of `says` occurs.
pub(crate) fn refuses(ranks: &[usize], args: &[String], exit: i32, says: &[&str]) {
    for &ranks in ranks {
        let output = run(command(ranks).args(args));
        assert_eq!(output.code, Some(exit), "{args:?} on {ranks} rank(s):\n{}", output.stderr);
        let message = message(&output);
        for text in says {
            assert!(message.contains(text), "{args:?} on {ranks} rank(s): no `{text}` in\n{message}");
        }
    }
}

/// Umbra's own words: one error of at most one screen (24 lines), in front of whatever mpirun has to say.
pub(crate) fn message(output: &Output) -> String {
    assert_eq!(output.stdout, "", "an error belongs to standard error");
    let own: Vec<&str> = output.stderr.lines().take_while(|line| !line.starts_with("-----")).collect();
    let text = own.join("\n");
    assert_eq!(output.stderr.matches("error: ").count(), 1, "one message in\n{}", output.stderr);
    assert!(text.starts_with("error: "), "the message comes first:\n{}", output.stderr);
    assert!(own.len() <= 24, "{} lines:\n{text}", own.len());
    assert!(!output.stderr.contains("panicked"), "{}", output.stderr);
    text
}
