//! The `vpmm` command.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use vpmm_cli::args::Cli;
use vpmm_cli::command;
use vpmm_cli::exit::Exit;

fn main() -> ExitCode {
    // Clap ends the process itself for --help (0) and wrong usage (2).
    let cli = Cli::parse();
    let exit = command::run(cli, &mut io::stdout().lock()).unwrap_or_else(|abort| {
        if !abort.message.is_empty() {
            let _ = writeln!(io::stderr(), "vpmm: {abort}");
        }
        abort.exit
    });
    Exit::into(exit)
}
