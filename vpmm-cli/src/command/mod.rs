//! The subcommands.

mod info;
mod replay;

use std::io::Write;

use crate::args::{Cli, Command};
use crate::exit::{Abort, Exit};

/// Runs what the command line asks for; results go to `out`, remarks to standard error.
///
/// # Errors
/// [`Abort`], where the work was not done to its end.
pub fn run(cli: Cli, out: &mut dyn Write) -> Result<Exit, Abort> {
    match cli.command {
        Command::Replay(args) => replay::replay(&args, out),
        Command::Info(args) => info::info(&args, out),
    }
}

/// Says something on standard error; if nobody can hear it, so be it.
fn remark(text: &str) {
    let _ = writeln!(std::io::stderr(), "vpmm: {text}");
}
