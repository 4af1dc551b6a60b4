#!/bin/sh
# From a training script to a package that runs where precast is not installed: five commands.
set -e
python train.py
precast export --model classifier:build --policy default --dtype bfloat16 --out classifier.pt2
precast explain --exported classifier.pt2
precast export --model classifier:build --policy default --dtype bfloat16 --to aoti --out classifier.aoti.pt2
python serve.py classifier.aoti.pt2 points.pt answer.pt
