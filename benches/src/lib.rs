//! Nothing of its own: the benches are in `benches/`. Run them with `cargo bench --package kvferry-benches`.
