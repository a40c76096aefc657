//! Work beside memory that has moved, while the addresses that it has left wait for a stream.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use vpmm::StreamHandle;

use super::loops::Hands;
use super::script::Zombies;
use super::subject::Subject;
use super::{Bench, BenchError};

/// Then the stream goes on, whatever is done: who waits for it after all does not wait for ever.
const LONGEST: Duration = Duration::from_secs(60);

/// Does the work while the zombies wait. Where they are too few at its end the case is left out.
pub(super) fn among<S: Subject, T>(
    zombies: &Zombies,
    bench: &Bench<'_>,
    subject: &S,
    streams: &[StreamHandle],
    work: impl FnOnce() -> Result<T, BenchError>,
) -> Result<T, BenchError> {
    let mut hands = Hands::new(subject, streams, zombies.slots);
    let worked = among_held(zombies, bench, subject, streams, &mut hands, work);
    let freed = hands.let_go();
    let worked = worked?;
    freed?;
    Ok(worked)
}

fn among_held<S: Subject, T>(
    zombies: &Zombies,
    bench: &Bench<'_>,
    subject: &S,
    streams: &[StreamHandle],
    hands: &mut Hands<'_, S>,
    work: impl FnOnce() -> Result<T, BenchError>,
) -> Result<T, BenchError> {
    bench.enter()?;
    hands.run_steps(&zombies.scatter)?;
    hands.sort(zombies.blocks);
    let stall = &bench.stall(streams[zombies.stream as usize])?;
    thread::scope(|scope| {
        let (_over, is_over) = mpsc::channel::<()>();
        thread::Builder::new().spawn_scoped(scope, move || {
            if is_over.recv_timeout(LONGEST) == Err(RecvTimeoutError::Timeout) {
                stall.release();
            }
        })?;
        hands.run_steps(&zombies.free)?;
        // No more may be made: what the requests lack has to move.
        subject.limit_to(Some(zombies.most_bytes))?;
        let gathered = hands.run_steps(&zombies.gather);
        subject.limit_to(None)?;
        let expected = u64::from(zombies.count);
        let waiting = || subject.zombie_bytes().map(|bytes| bytes / zombies.bytes_each);
        if let Err(error) = gathered {
            // The limit is the case's own: what was freed does not move.
            return Err(match waiting() {
                Some(waiting) if error.is_out_of_memory() => {
                    BenchError::FewZombies { waiting, expected }
                }
                _ => error.into(),
            });
        }
        let worked = work()?;
        match waiting() {
            Some(waiting) if waiting < expected => {
                Err(BenchError::FewZombies { waiting, expected })
            }
            _ => Ok(worked),
        }
    })
}
