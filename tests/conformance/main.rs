//! What the driver answers: one list of calls with the answers expected, asked of the
//! simulator everywhere and of a real GPU where there is one.
//!
//! The list is the simulator's specification and says where each answer comes from: all were
//! seen on a GPU or are documented by NVIDIA, and where the documentation leaves the code open
//! several are allowed. The simulator is asked under several schedules, because an answer must
//! not depend on how fast a device is. Set `VPMM_CONFORMANCE_PRINT=1` to print what the GPU
//! answers to each row.

mod probe;
mod rows;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cuda_sim::{Schedule, Simulator};
use cuda_sys::Driver;
use cuda_sys::types::*;

use probe::{Probe, Target, Trouble};
use rows::{Row, Where};

/// What a row came to: a code, or why there is none.
type Outcome = Result<CUresult, String>;

/// Asks one row and cleans up after it.
fn ask(row: &Row, target: &Target<'_>) -> Outcome {
    let probe = Probe::new(target);
    let outcome = (row.run)(&probe).map_err(|trouble: Trouble| trouble.to_string());
    match probe.clean_up() {
        Ok(()) => outcome,
        Err(refused) => {
            let outcome = show(&outcome);
            Err(format!("{outcome}, then the clean-up failed: {}", Trouble::from(refused)))
        }
    }
}

fn show(outcome: &Outcome) -> String {
    match outcome {
        Ok(code) => code.name().map_or_else(
            || code.to_string(),
            |name| name.strip_prefix("CUDA_").unwrap_or(name).to_owned(),
        ),
        Err(why) => why.clone(),
    }
}

fn expected(row: &Row) -> String {
    let codes: Vec<String> = row.expect.iter().map(|&code| show(&Ok(code))).collect();
    codes.join(" or ")
}

fn as_listed(row: &Row, outcome: &Outcome) -> bool {
    outcome.as_ref().is_ok_and(|code| row.expect.contains(code))
}

/// Schedules under which the simulator must answer alike.
fn schedules() -> Vec<(String, Schedule, u64)> {
    let mut all = vec![
        ("eager".to_owned(), Schedule::Eager, 0),
        ("late".to_owned(), Schedule::Late { patience: 3 }, 0),
    ];
    all.extend((1..=4).map(|seed| (format!("random, seed {seed}"), Schedule::Random, seed)));
    all
}

/// The simulator's answer to a row, from a machine made for it, with what it found wrong.
fn ask_simulator(row: &Row, schedule: Schedule, seed: u64) -> Outcome {
    let simulator: Simulator = Simulator::builder()
        .schedule(schedule)
        .seed(seed)
        .build()
        .map_err(|error| error.to_string())?;
    let driver = simulator.driver();
    let target = Target::open(&driver).map_err(|refused| Trouble::from(refused).to_string())?;
    let outcome = ask(row, &target);
    target.close().map_err(|refused| Trouble::from(refused).to_string())?;
    let report = simulator.report();
    if let Some(race) = report.races.first() {
        return Err(format!("{race}"));
    }
    match row.asked {
        Where::Everywhere if !report.misuse.is_empty() => {
            return Err(format!("{} but misuse: {}", show(&outcome), report.misuse.join("; ")));
        }
        Where::SimulatorOnly if report.misuse.is_empty() => {
            return Err(format!("{}, with no misuse reported", show(&outcome)));
        }
        _ => {}
    }
    if !report.leaks.is_empty() {
        return Err(format!("{}, leaving {:?}", show(&outcome), report.leaks));
    }
    outcome
}

/// Ends the process if a row takes too long: a GPU that never answers must not hang a test run.
struct Watchdog {
    row: Arc<Mutex<Option<&'static str>>>,
}

impl Watchdog {
    fn start() -> Self {
        let row: Arc<Mutex<Option<&'static str>>> = Arc::default();
        let watched = row.clone();
        std::thread::spawn(move || {
            let mut last = None;
            loop {
                std::thread::sleep(Duration::from_secs(60));
                let now = *watched.lock().unwrap();
                if now.is_some() && now == last {
                    say(&format!("the driver hangs in row `{}`", now.unwrap_or_default()));
                    std::process::exit(101);
                }
                last = now;
            }
        });
        Self { row }
    }

    fn watch(&self, row: Option<&'static str>) {
        *self.row.lock().unwrap() = row;
    }
}

/// Prints past the test harness's capture: what was skipped must be seen.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// The GPU's answers by row, or why there is none to ask.
fn ask_gpu(rows: &[Row]) -> Result<BTreeMap<&'static str, Outcome>, String> {
    let driver = Driver::load().map_err(|error| format!("no CUDA driver: {error}"))?;
    let target = Target::open(&driver)
        .map_err(|refused| format!("no usable CUDA device: {}", Trouble::from(refused)))?;
    let watchdog = Watchdog::start();
    let mut answers = BTreeMap::new();
    for row in rows.iter().filter(|row| row.asked == Where::Everywhere) {
        watchdog.watch(Some(row.name));
        let outcome = ask(row, &target);
        if std::env::var_os("VPMM_CONFORMANCE_PRINT").is_some() {
            say(&format!("{:<78} {}", row.name, show(&outcome)));
        }
        answers.insert(row.name, outcome);
    }
    watchdog.watch(None);
    target.close().map_err(|refused| Trouble::from(refused).to_string())?;
    Ok(answers)
}

#[test]
fn simulator_and_gpu_answer_as_listed() {
    let rows = rows::all();
    let gpu = ask_gpu(&rows).unwrap_or_else(|why| {
        say(&format!("conformance on a GPU skipped: {why}"));
        BTreeMap::new()
    });
    let mut wrong = String::new();
    for row in &rows {
        let simulated: Vec<(String, Outcome)> = schedules()
            .into_iter()
            .map(|(name, schedule, seed)| (name, ask_simulator(row, schedule, seed)))
            .collect();
        let simulated = simulated.iter().find(|(_, outcome)| !as_listed(row, outcome));
        let real = gpu.get(row.name).filter(|outcome| !as_listed(row, outcome));
        if simulated.is_none() && real.is_none() {
            continue;
        }
        let simulated = simulated.map_or("as expected".to_owned(), |(schedule, outcome)| {
            format!("{} ({schedule})", show(outcome))
        });
        let real = match (real, gpu.contains_key(row.name)) {
            (Some(outcome), _) => show(outcome),
            (None, true) => "as expected".to_owned(),
            (None, false) => "not asked".to_owned(),
        };
        let _ = write!(
            wrong,
            "\n{}\n    expected   {}\n    simulator  {simulated}\n    GPU        {real}\n",
            row.name,
            expected(row)
        );
    }
    assert!(wrong.is_empty(), "answers that differ from the list:\n{wrong}");
}

#[test]
fn row_names_are_unique() {
    let mut names: Vec<&str> = rows::all().iter().map(|row| row.name).collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count);
}
