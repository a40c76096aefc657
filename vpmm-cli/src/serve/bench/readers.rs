//! Many readers at once, each with all of the layout mapped: some processes with some managers each, as a
//! process's context takes memory of the device.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gms::client::MemoryManager;
use gms::lock::Requested;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{Bench, ms, ordinal, spread};
use crate::exit::{Abort, Exit};

/// Processes, and managers in each.
const PROCESSES: usize = 16;
const MANAGERS: usize = 16;

/// What a process of readers says when all of its have the layout.
#[derive(Serialize, Deserialize)]
struct Told {
    /// How long each took from the word on.
    ns: Vec<u64>,
}

/// A process of readers; killed if it is not told to end.
struct Readers {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Readers {
    fn start(bench: &Bench<'_>, managers: usize) -> Result<Self, Abort> {
        let program = std::env::current_exe().map_err(Abort::failure)?;
        let mut command = Command::new(program);
        command.args(["serve-bench", "--device", &bench.args.device.to_string()]);
        command.args(["--readers", &managers.to_string(), "--socket-path"]).arg(&bench.socket);
        if let Some(spin) = bench.args.spin {
            command.args(["--spin", &spin.to_string()]);
        }
        if bench.args.no_batch {
            command.arg("--no-batch");
        }
        Self::of(&mut command)
    }

    fn of(command: &mut Command) -> Result<Self, Abort> {
        let started = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = started.map_err(Abort::failure)?;
        let pipe = || Abort::failure("a process without its pipes");
        let output = BufReader::new(child.stdout.take().ok_or_else(pipe)?);
        Ok(Self { input: child.stdin.take(), child, output })
    }

    fn hear(&mut self) -> Result<String, Abort> {
        let mut line = String::new();
        match self.output.read_line(&mut line).map_err(Abort::failure)? {
            0 => Err(Abort::failure("a process of readers has ended")),
            _ => Ok(line),
        }
    }

    /// Not as output: that this reader has gone is no end of the kind that is well.
    fn go(&mut self) -> Result<(), Abort> {
        let told = self.input.as_mut().map_or(Ok(()), |input| input.write_all(b"go\n"));
        told.map_err(|error| Abort::failure(format_args!("a process of readers: {error}")))
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        // The end of its input is the word to end.
        drop(self.input.take());
        let started = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            if started.elapsed() > super::PATIENCE {
                let _ = self.child.kill();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Is a process of readers.
pub(super) fn read(bench: &mut Bench<'_>, managers: usize) -> Result<Exit, Abort> {
    let ordinal = ordinal(bench.args.device);
    let made = (0..managers).map(|_| MemoryManager::new(&bench.driver, ordinal, &bench.socket));
    let mut made: Vec<MemoryManager> = made.collect::<Result<_, _>>().map_err(Abort::failure)?;
    bench.say(json!("ready"))?;
    let mut input = std::io::stdin().lock();
    input.read_line(&mut String::new()).map_err(Abort::failure)?;
    let options = bench.options(Requested::Ro);
    let barrier = Barrier::new(managers);
    let import = |manager: &mut MemoryManager| -> Result<u64, Abort> {
        barrier.wait();
        let started = Instant::now();
        manager.connect(options).map_err(Abort::failure)?;
        manager.import_all(None).map_err(Abort::failure)?;
        Ok(started.elapsed().as_nanos() as u64)
    };
    let ns = std::thread::scope(|scope| {
        let threads: Vec<_> =
            made.iter_mut().map(|manager| scope.spawn(|| import(manager))).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Result<u64, Abort>>| {
            thread.join().unwrap_or_else(|_| Err(Abort::failure("a reader panicked")))
        };
        threads.into_iter().map(join).collect::<Result<Vec<u64>, Abort>>()
    })?;
    bench.say(serde_json::to_value(Told { ns }).map_err(Abort::failure)?)?;
    // The layout stays mapped until all have it.
    input.read_to_end(&mut Vec::new()).map_err(Abort::failure)?;
    Ok(Exit::Done)
}

impl Bench<'_> {
    /// How long readers take when they come at once, what one of them takes by itself, and how long
    /// the server's answers take another session meanwhile, which tells whether it lets anybody wait for
    /// somebody else's import. The driver has locks of its own.
    pub(super) fn readers_at_once(&mut self) -> Result<(), Abort> {
        let processes = self.count(PROCESSES, 2);
        let managers = self.count(MANAGERS, 2);
        let (count, bytes) = self.layout();
        let mut writer = self.manager(Requested::Rw)?;
        writer.create_mappings(&vec![bytes; count], "bench").map_err(Abort::failure)?;
        writer.commit().map_err(Abort::failure)?;
        drop(writer);

        let mut alone = Vec::new();
        for _ in 0..self.count(5, 1) {
            let manager = MemoryManager::new(&self.driver, ordinal(self.args.device), &self.socket);
            let mut reader = manager.map_err(Abort::failure)?;
            let started = Instant::now();
            reader.connect(self.options(Requested::Ro)).map_err(Abort::failure)?;
            reader.import_all(None).map_err(Abort::failure)?;
            alone.push(started.elapsed());
            reader.close().map_err(Abort::failure)?;
        }
        let mut readers = (0..processes)
            .map(|_| Readers::start(self, managers))
            .collect::<Result<Vec<_>, Abort>>()?;
        for process in &mut readers {
            process.hear()?;
        }
        let mut session = self.session(Requested::Ro)?;
        let done = AtomicBool::new(false);
        let ask = || -> Result<Vec<Duration>, Abort> {
            let mut times = Vec::new();
            while !done.load(Ordering::Relaxed) {
                let started = Instant::now();
                session.allocation_count().map_err(Abort::failure)?;
                times.push(started.elapsed());
                std::thread::sleep(Duration::from_micros(200));
            }
            Ok(times)
        };
        let started = Instant::now();
        let (told, answers) = std::thread::scope(|scope| {
            let asking = scope.spawn(ask);
            let mut storm = || -> Result<Vec<Duration>, Abort> {
                readers.iter_mut().try_for_each(Readers::go)?;
                let mut times = Vec::new();
                for process in &mut readers {
                    let told: Told =
                        serde_json::from_str(&process.hear()?).map_err(Abort::failure)?;
                    times.extend(told.ns.into_iter().map(Duration::from_nanos));
                }
                Ok(times)
            };
            let told = storm();
            done.store(true, Ordering::Relaxed);
            let panicked = |_| Err(Abort::failure("the thread that asks panicked"));
            (told, asking.join().unwrap_or_else(panicked))
        });
        let (times, answers) = (told?, answers?);
        let all = started.elapsed();
        let slowest = times.iter().max().copied().unwrap_or_default();
        let longest = answers.iter().max().copied().unwrap_or_default();
        let (answer_p50, answer_p99) = spread(answers);
        self.say(json!({
            "case": "readers_at_once",
            "readers": times.len(),
            "processes": processes,
            "allocations": count,
            "alone_ms": spread(alone).0 / 1e3,
            "ms_p50": spread(times).0 / 1e3,
            "ms_slowest": ms(slowest),
            "all_ms": ms(all),
            "request_us_p50": answer_p50,
            "request_us_p99": answer_p99,
            "request_us_slowest": super::us(longest),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_that_have_gone_are_a_failure() {
        let mut readers = Readers::of(&mut Command::new("true")).unwrap();
        readers.child.wait().unwrap();
        for told in [readers.go(), readers.hear().map(drop)] {
            let abort = told.unwrap_err();
            assert_eq!(abort.exit, Exit::Failure, "{abort}");
            assert!(abort.message.starts_with("a process of readers"), "{abort}");
        }
    }
}
