//! The lock against its rules, over random sequences of what sessions do.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

#[derive(Clone, Copy, Debug)]
enum Step {
    Request(Requested),
    Enter(usize),
    Leave(usize),
    Commit(usize),
    Seal(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let requested = prop_oneof![
        2 => Just(Requested::Rw),
        3 => Just(Requested::Ro),
        2 => Just(Requested::RwOrRo),
        1 => Just(Requested::RwDataOrRw),
    ];
    let step = prop_oneof![
        4 => requested.prop_map(Step::Request),
        4 => (0..8_usize).prop_map(Step::Enter),
        3 => (0..8_usize).prop_map(Step::Leave),
        2 => (0..8_usize).prop_map(Step::Commit),
        1 => (0..8_usize).prop_map(Step::Seal),
    ];
    prop::collection::vec(step, 1..120)
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum At {
    Waiting(Requested),
    Reserved(Granted),
    Inside(Granted),
}

/// What the rules say, kept apart from the lock: every session with where it is, in order of arrival.
#[derive(Default)]
struct Model {
    sessions: BTreeMap<SessionId, At>,
    committed: bool,
    sealed: bool,
}

impl Model {
    fn count(&self, like: impl Fn(At) -> bool) -> usize {
        self.sessions.values().filter(|at| like(**at)).count()
    }

    fn writers(&self) -> usize {
        self.count(|at| {
            matches!(at, At::Reserved(granted) | At::Inside(granted) if granted != Granted::Ro)
        })
    }

    fn readers(&self) -> usize {
        self.count(|at| matches!(at, At::Reserved(Granted::Ro) | At::Inside(Granted::Ro)))
    }

    fn waiting_writers(&self) -> usize {
        self.count(|at| matches!(at, At::Waiting(Requested::Rw | Requested::RwDataOrRw)))
    }

    /// Takes over what the lock newly granted, each grant checked against the rules at its moment.
    fn grants(&mut self, lock: &mut Lock) {
        for session in lock.take_newly_granted() {
            let granted = lock.granted(session).unwrap();
            let Some(At::Waiting(requested)) = self.sessions.get(&session).copied() else {
                panic!("{session} did not wait");
            };
            assert_eq!(self.writers(), 0, "nobody is granted anything beside a writer");
            match granted {
                Granted::Ro => {
                    assert!(self.committed && self.waiting_writers() == 0);
                    assert!(matches!(requested, Requested::Ro | Requested::RwOrRo));
                }
                Granted::Rw | Granted::RwData => {
                    assert_eq!(self.readers(), 0);
                    let sealed_only = self.sealed && !self.committed;
                    let data = granted == Granted::RwData;
                    assert_eq!(data, requested == Requested::RwDataOrRw && sealed_only);
                    assert_ne!(requested, Requested::Ro);
                    assert!(requested != Requested::RwOrRo || !self.committed);
                    // First come, first served among those who could write now.
                    let earlier = self.sessions.range(..session).any(|(_, at)| match at {
                        At::Waiting(Requested::RwOrRo) => !self.committed,
                        At::Waiting(requested) => *requested != Requested::Ro,
                        _ => false,
                    });
                    assert!(!earlier, "{session} came before its turn");
                }
            }
            self.sessions.insert(session, At::Reserved(granted));
        }
        self.nobody_waits_in_vain();
    }

    fn nobody_waits_in_vain(&self) {
        if self.writers() > 0 {
            return;
        }
        let alone = self.readers() == 0;
        for at in self.sessions.values() {
            match at {
                At::Waiting(Requested::Rw | Requested::RwDataOrRw) => assert!(!alone),
                At::Waiting(Requested::Ro) => {
                    assert!(!self.committed || self.waiting_writers() > 0);
                }
                At::Waiting(Requested::RwOrRo) => {
                    assert!(self.committed || !alone);
                    assert!(!self.committed || self.waiting_writers() > 0);
                }
                At::Reserved(_) | At::Inside(_) => {}
            }
        }
    }

    fn agrees(&self, lock: &Lock) {
        let snapshot = lock.snapshot();
        let inside = |granted| self.count(move |at| at == At::Inside(granted));
        let writing = inside(Granted::Rw) + inside(Granted::RwData);
        assert!(writing <= 1 && (writing == 0 || self.readers() == 0));
        assert_eq!(snapshot.has_writer, writing == 1);
        assert_eq!(snapshot.readers, inside(Granted::Ro));
        assert_eq!(snapshot.waiting_writers, self.waiting_writers());
        assert_eq!(snapshot.waiting, self.count(|at| matches!(at, At::Waiting(_))));
        assert_eq!(snapshot.committed, self.committed);
        let state = match () {
            () if writing == 1 => State::Rw,
            () if inside(Granted::Ro) > 0 => State::Ro,
            () if self.committed => State::Committed,
            () if self.sealed => State::LayoutCommitted,
            () => State::Empty,
        };
        assert_eq!(snapshot.state, state);
        assert!(!(snapshot.has_writer && snapshot.committed), "a writer's layout is not published");
    }
}

fn run(steps: &[Step]) {
    let (mut lock, mut model, mut next) = (Lock::new(), Model::default(), 1);
    for step in steps {
        let nth = |index: usize| model.sessions.keys().copied().nth(index);
        match *step {
            Step::Request(requested) => {
                model.sessions.insert(next, At::Waiting(requested));
                lock.request(next, requested);
                next += 1;
            }
            Step::Enter(index) => {
                let Some(session) = nth(index) else { continue };
                let entered = lock.enter(session);
                let At::Reserved(granted) = model.sessions[&session] else {
                    assert_eq!(entered, None);
                    continue;
                };
                let writes = granted != Granted::Ro;
                let replaces_committed = writes && model.committed;
                if writes {
                    model.committed = false;
                    model.sealed &= granted == Granted::RwData;
                }
                let committed = model.committed;
                assert_eq!(entered, Some(Entered { granted, replaces_committed, committed }));
                model.sessions.insert(session, At::Inside(granted));
            }
            Step::Leave(index) => {
                let Some(session) = nth(index) else { continue };
                let expected = match model.sessions.remove(&session) {
                    Some(At::Inside(Granted::Ro)) => Left::Reader,
                    Some(At::Inside(_)) if model.sealed => Left::WriterOfSealed,
                    Some(At::Inside(_)) => Left::WriterAborted,
                    _ => Left::Nothing,
                };
                assert_eq!(lock.leave(session), expected);
            }
            Step::Commit(index) => {
                let Some(session) = nth(index) else { continue };
                let may = model.sessions[&session] == At::Inside(Granted::Rw);
                assert_eq!(lock.commit(session), may);
                if may {
                    model.sessions.remove(&session);
                    model.committed = true;
                }
            }
            Step::Seal(index) => {
                let Some(session) = nth(index) else { continue };
                let may = model.sessions[&session] == At::Inside(Granted::Rw);
                assert_eq!(lock.seal(session), may);
                if may {
                    model.sessions.insert(session, At::Inside(Granted::RwData));
                    model.sealed = true;
                }
            }
        }
        model.grants(&mut lock);
        model.agrees(&lock);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn the_rules_hold_whatever_sessions_do(steps in steps()) {
        run(&steps);
    }
}

#[test]
fn a_waiting_writer_keeps_readers_out_until_it_gives_up() {
    let mut lock = Lock::new();
    lock.request(1, Requested::Rw);
    lock.enter(1);
    assert!(lock.commit(1));
    lock.request(2, Requested::Ro);
    lock.request(3, Requested::Rw);
    lock.request(4, Requested::RwOrRo);
    assert_eq!([2, 3, 4].map(|session| lock.granted(session)), [Some(Granted::Ro), None, None]);
    lock.leave(3);
    assert_eq!(lock.granted(4), Some(Granted::Ro));
}

#[test]
fn a_writer_that_dies_before_it_enters_takes_nothing_away() {
    let mut lock = Lock::new();
    lock.request(1, Requested::Rw);
    lock.enter(1);
    assert!(lock.commit(1));
    lock.request(2, Requested::Ro);
    lock.request(3, Requested::Rw);
    lock.request(4, Requested::Ro);
    lock.leave(2);
    assert_eq!(lock.granted(3), Some(Granted::Rw));
    assert_eq!(lock.leave(3), Left::Nothing);
    assert_eq!((lock.granted(4), lock.state()), (Some(Granted::Ro), State::Committed));
}
