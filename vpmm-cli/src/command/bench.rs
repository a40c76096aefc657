//! `vpmm bench`.

use std::io::Write;

use super::traces::check_logs;
use super::{Rows, bar, finish, remark};
use crate::args::BenchArgs;
use crate::backend::is_bad_setting;
use crate::bench::{Amount, Bench, BenchError, Case, Figures};
use crate::device::Setup;
use crate::exit::{Abort, Exit};
use crate::report::{BenchReport, bench_table};

pub(super) fn bench(args: &BenchArgs, out: &mut dyn Write) -> Result<Exit, Abort> {
    check_logs(&[], &args.allocator.0)?;
    let (reports, mut exit) = (Rows::new(args.json, bench_table), Exit::Done);
    let end = bench_all(args, &reports, &mut exit, out);
    finish(end, exit, args.json, &reports, bench_table, out)
}

fn bench_all(
    args: &BenchArgs,
    reports: &Rows<BenchReport>,
    exit: &mut Exit,
    out: &mut dyn Write,
) -> Result<(), Abort> {
    let cases = args.case.as_ref().map_or(&Case::ALL[..], |list| &list.0);
    let allocators = &args.allocator.0;
    let amount = if args.quick { Amount::Quick } else { Amount::Full };
    let device = args.device.settle(remark);
    let open = || device.open(Setup::default()).map_err(Abort::failure);

    let mut machine = open()?;
    let bar = bar((cases.len() * allocators.len()) as u64);
    for &case in cases {
        for allocator in allocators {
            bar.set_message(format!("{case} {allocator}"));
            bar.tick();
            let result = Bench::new(&machine, amount).run(case, allocator);
            bar.inc(1);
            let report = BenchReport::new(case, allocator, machine.label(), &result);
            if let Err(error) = &result {
                if let BenchError::Allocator(source) = error
                    && is_bad_setting(source)
                {
                    return Err(Abort::bad_input(source));
                }
                bar.suspend(|| remark(&format!("{case}: {allocator}: {error}")));
            }
            let end = end_of(&result);
            *exit = exit.and(end);
            if end == Exit::Failure {
                // A device that has failed may answer nothing more.
                drop(machine);
                machine = open()?;
            }
            if args.json {
                let line = serde_json::to_string(&report).map_err(Abort::failure)?;
                writeln!(out, "{line}")?;
                out.flush()?;
            } else {
                reports.push(report);
            }
        }
    }
    bar.finish_and_clear();
    Ok(())
}

fn end_of(result: &Result<Figures, BenchError>) -> Exit {
    match result {
        Ok(_) => Exit::Done,
        Err(error) if error.is_left_out() => Exit::Done,
        Err(error) if error.is_out_of_memory() => Exit::OutOfMemory,
        Err(_) => Exit::Failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_failures_fail() {
        let config = vpmm::Error::ZeroSize;
        assert_eq!(end_of(&Err(config.into())), Exit::Failure);
        assert_eq!(end_of(&Err(BenchError::TooSlow { calls: 1, call_ns: 1.0 })), Exit::Done);
        let oom = vpmm::Error::Driver {
            call: "cuMemCreate",
            code: cuda_sys::types::CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            bytes: 1,
        };
        assert_eq!(end_of(&Err(oom.into())), Exit::OutOfMemory);
    }
}
