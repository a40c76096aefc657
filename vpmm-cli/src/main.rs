//! The `vpmm` command.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use vpmm_cli::args::Cli;
use vpmm_cli::command;
use vpmm_cli::exit::{Abort, Exit};

fn main() -> ExitCode {
    let exit = run().unwrap_or_else(|abort| {
        if !abort.message.is_empty() {
            let _ = writeln!(io::stderr(), "vpmm: {abort}");
        }
        abort.exit
    });
    Exit::into(exit)
}

fn run() -> Result<Exit, Abort> {
    match Cli::try_parse() {
        // Not locked: a signal may have something to print, too.
        Ok(cli) => command::run(cli, &mut io::stdout()),
        // Wrong usage: ends the process, with 2.
        Err(error) if error.use_stderr() => error.exit(),
        // --help and --version are output like any other.
        Err(text) => {
            text.print()?;
            io::stdout().flush()?;
            Ok(Exit::Done)
        }
    }
}
