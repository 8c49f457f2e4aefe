//! Who moves a worker along while somebody polls it or waits for it, which the threads that hear of events tell.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, unbounded};
use kvferry_test_process::within;
use kvferry_wire::{Context, ContextOptions, EndpointId, Worker};
use rustix::time::{ClockId, clock_gettime};

use crate::suite::end::DEADLINE;

/// A worker that is its own peer, and the threads on which it heard its frames.
fn worker(options: &ContextOptions) -> (Arc<Worker>, EndpointId, Receiver<ThreadId>) {
    let context = Context::open(options).unwrap();
    let (heard, threads) = unbounded();
    let worker = Worker::start_with(&context, 1, move |_| {
        let _ = heard.send(thread::current().id()); // the test may be over
    })
    .unwrap();
    let endpoint = worker.connect(worker.address(), worker.epoch()).unwrap();
    (Arc::new(worker), endpoint, threads)
}

fn send(worker: &Worker, endpoint: EndpointId) {
    worker.send(endpoint, 0, Vec::new()).unwrap();
    worker.carry_out();
}

/// Polls until a frame has come, and says where.
fn polled(worker: &Worker, endpoint: EndpointId, threads: &Receiver<ThreadId>) -> ThreadId {
    let start = Instant::now();
    send(worker, endpoint);
    loop {
        if let Ok(thread) = threads.try_recv() {
            return thread;
        }
        worker.progress();
        assert!(start.elapsed() < DEADLINE);
    }
}

#[test]
fn whoever_polls_moves_the_worker_in_the_place_of_its_thread() {
    let (worker, endpoint, threads) = worker(&ContextOptions::default());
    let start = Instant::now();
    // Which thread is first to see a frame is chance, until the worker's rests.
    while polled(&worker, endpoint, &threads) != thread::current().id() {
        assert!(start.elapsed() < DEADLINE);
    }
}

/// What a panic drops may command the worker, and move it along while the panic unwinds.
#[test]
fn a_callers_panic_is_the_callers_alone() {
    struct Farewell<'a>(&'a Worker, EndpointId);

    impl Drop for Farewell<'_> {
        fn drop(&mut self) {
            send(self.0, self.1);
        }
    }

    let (worker, endpoint, threads) = worker(&ContextOptions::default());
    polled(&worker, endpoint, &threads);
    thread::sleep(Duration::from_millis(100)); // the progress thread sleeps, and what is commanded is carried out here
    let ended = catch_unwind(AssertUnwindSafe(|| {
        let _farewell = Farewell(&worker, endpoint);
        panic!("on purpose");
    }));
    assert!(ended.is_err());
    for _ in 0..2 {
        threads.recv_timeout(DEADLINE).expect("the worker goes on");
        send(&worker, endpoint);
    }
}

#[test]
fn a_thread_with_a_processor_of_its_own_is_not_replaced() {
    let (worker, endpoint, threads) = worker(&ContextOptions { cpus: vec![0], ..ContextOptions::default() });
    for _ in 0..200 {
        assert_ne!(polled(&worker, endpoint, &threads), thread::current().id());
    }
    assert!(!worker.progress());
}

/// The progress thread is not even awake then.
#[test]
fn whoever_waits_sleeps_in_the_place_of_the_thread_and_is_woken_in_its_place() {
    within(Duration::from_millis(100), || {
        let (worker, endpoint, threads) = worker(&ContextOptions::default());
        polled(&worker, endpoint, &threads);
        let waiting = {
            let worker = worker.clone();
            thread::spawn(move || {
                let deadline = Instant::now() + DEADLINE;
                // The place may be taken for a moment, by the thread that has yet to leave it.
                let wait = || worker.drive(deadline, || threads.try_recv().ok());
                let heard = std::iter::repeat_with(wait).find(|heard| heard.is_some() || Instant::now() >= deadline);
                (heard.flatten(), thread::current().id(), clock_gettime(ClockId::ThreadCPUTime))
            })
        };
        thread::sleep(Duration::from_secs(1));
        send(&worker, endpoint);
        let (heard, waiter, cpu) = waiting.join().unwrap();
        // Sent from this thread, it may have been taken in by it too.
        assert!(heard == Some(waiter) || heard == Some(thread::current().id()), "{heard:?}, {waiter:?}");
        // Of processor time, in a second.
        Duration::try_from(cpu).unwrap()
    });
}

/// What one waits for may come about without the worker.
#[test]
fn whoever_waits_looks_again_when_interrupted_and_ends_at_its_deadline() {
    let (worker, ..) = worker(&ContextOptions::default());
    // Asleep it looks by itself once a second.
    let asleep = Duration::from_secs(1);
    let interrupted = || {
        let (flag, start) = (AtomicBool::new(false), Instant::now());
        thread::scope(|scope| {
            let (worker, flag) = (&worker, &flag);
            let done = || flag.load(Ordering::SeqCst).then_some(());
            let deadline = start + DEADLINE;
            // As above.
            let wait = move || worker.drive(deadline, done);
            let ended = move |woken: &Option<()>| woken.is_some() || Instant::now() >= deadline;
            let waiting = scope.spawn(move || std::iter::repeat_with(wait).find(ended).flatten());
            thread::sleep(Duration::from_millis(50));
            flag.store(true, Ordering::SeqCst);
            worker.interrupt();
            assert_eq!(waiting.join().unwrap(), Some(()));
        });
        start.elapsed()
    };
    (0..6).for_each(|_| within(asleep / 2, interrupted));
    let start = Instant::now();
    assert_eq!(worker.drive(start + Duration::from_millis(100), || None::<()>), None);
    assert!(start.elapsed() >= Duration::from_millis(100));
}
