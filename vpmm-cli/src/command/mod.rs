//! The subcommands.

mod bench;
mod fit;
mod info;
mod replay;
mod rows;
mod traces;

use std::io::Write;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::args::{Cli, Command};
use crate::exit::{Abort, Exit};
use crate::serve;
use rows::Rows;

/// Runs what the command line asks for; results go to `out`, remarks to standard error.
///
/// # Errors
/// [`Abort`], where the work was not done to its end.
pub fn run(cli: Cli, out: &mut dyn Write) -> Result<Exit, Abort> {
    let pools = matches!(cli.command, Command::Replay(_) | Command::Bench(_) | Command::Fit(_));
    if pools {
        // Told whichever allocator is asked for: who sets a variable means it to be used.
        vpmm::PagedConfig::from_env().map_err(Abort::bad_input)?;
    }
    match cli.command {
        Command::Replay(args) => replay::replay(&args, out),
        Command::Bench(args) => bench::bench(&args, out),
        Command::Fit(args) => fit::fit(&args, out),
        Command::Info(args) => info::info(&args, out),
        Command::Serve(args) => serve::serve(&args),
        Command::Snapshot(args) => serve::snapshot(&args, out),
        Command::ServeBench(args) => serve::bench(&args, out),
    }
}

/// Says something on standard error; if nobody can hear it, so be it.
fn remark(text: &str) {
    let _ = writeln!(std::io::stderr(), "vpmm: {text}");
}

/// Prints the table of what there is, and ends as the work did: what was found out until it was given up
/// may have taken hours. With JSON each result was printed as soon as it was there. `exit` is what the
/// results come to: it counts too where the work was given up, or nobody reads them any more.
fn finish<R: Send + 'static>(
    end: Result<(), Abort>,
    exit: Exit,
    json: bool,
    rows: &Rows<R>,
    table: fn(&[R]) -> String,
    out: &mut dyn Write,
) -> Result<Exit, Abort> {
    let reports = rows.take();
    let printed = if json || (end.is_err() && reports.is_empty()) {
        Ok(())
    } else {
        writeln!(out, "{}", table(&reports)).and_then(|()| out.flush())
    };
    // Why it was given up says more than that the output could not be written.
    match end.and_then(|()| printed.map_err(Abort::from)) {
        Ok(()) => Ok(exit),
        Err(abort) => Err(Abort { exit: exit.and(abort.exit), ..abort }),
    }
}

/// A bar on standard error where that is a terminal; hidden elsewhere.
pub(crate) fn bar(length: u64) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(length), ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template("{msg} {bar:40} {percent:>3} % {eta}") {
        bar.set_style(style);
    }
    bar
}
