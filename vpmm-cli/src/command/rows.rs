//! The rows of a table that is printed at the end, or when a signal ends the command before.

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::{fs, thread};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

/// What was found out so far.
pub(super) struct Rows<R> {
    rows: Arc<Mutex<Vec<R>>>,
}

impl<R: Send + 'static> Rows<R> {
    /// For a table on standard output: SIGINT, SIGTERM and SIGHUP print what there is of it, and then end the
    /// process as they do. With JSON each result is printed as soon as it is there, and nothing is kept here.
    pub(super) fn new(json: bool, table: fn(&[R]) -> String) -> Self {
        let rows = Arc::default();
        if !json {
            // Where it cannot be had the rows are lost with the process, as they were without.
            let _ = print_at_signals(Arc::clone(&rows), table);
        }
        Self { rows }
    }

    pub(super) fn push(&self, row: R) {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner).push(row);
    }

    /// All of them, to be printed: no signal prints them again.
    pub(super) fn take(&self) -> Vec<R> {
        taken(&self.rows)
    }
}

/// The lock is not held while they are printed: where nobody reads on a signal still ends the process.
fn taken<R>(rows: &Mutex<Vec<R>>) -> Vec<R> {
    std::mem::take(&mut *rows.lock().unwrap_or_else(PoisonError::into_inner))
}

fn print_at_signals<R: Send + 'static>(
    rows: Arc<Mutex<Vec<R>>>,
    table: fn(&[R]) -> String,
) -> io::Result<()> {
    let signals: Vec<i32> =
        [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| !is_ignored(*signal)).collect();
    // A second one ends the process at once, and so does the first where nobody waits for it.
    let ends_at_once = Arc::new(AtomicBool::new(false));
    let set_up = || {
        for signal in &signals {
            flag::register_conditional_default(*signal, Arc::clone(&ends_at_once))?;
        }
        let (mut waiting, ends_at_once) = (Signals::new(&signals)?, Arc::clone(&ends_at_once));
        let wait = move || {
            for signal in waiting.forever() {
                ends_at_once.store(true, Ordering::SeqCst);
                let rows = taken(&rows);
                if !rows.is_empty() {
                    print(&table(&rows));
                }
                let _ = emulate_default_handler(signal);
            }
        };
        thread::Builder::new().name("signals".to_owned()).spawn(wait).map(drop)
    };
    set_up().inspect_err(|_: &io::Error| ends_at_once.store(true, Ordering::SeqCst))
}

fn print(table: &str) {
    if io::stderr().is_terminal() {
        // Below the bar.
        let _ = writeln!(io::stderr());
    }
    let mut out = io::stdout();
    let _ = writeln!(out, "{table}").and_then(|()| out.flush());
}

/// Whether the process was started with the signal ignored, as by `nohup` or behind a shell's `&`: it stays so.
fn is_ignored(signal: i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & 1 << (signal - 1) != 0)
}
